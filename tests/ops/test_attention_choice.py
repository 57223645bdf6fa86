"""Which implementation computes attention, what each refuses, and attention that devices share."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.layers.basic import remat_policy
from brt.ops import dispatch, masked_attention, softmax_attention
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.window_attention import local_attention, window_part, window_part

KERNEL = "pallas_interpret"
# What the program of a kernel has.
SIGN = {"tpu": "pallas_call", "gpu": "copy_gmem_to_smem", "cpu": "pallas_call"}
V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.
BF16 = "bfloat16"
# Relative to the largest magnitude of an array. The gradient of a scale is one sum over all tokens,
# whose terms cancel: with six seeds, the results of one device and of several differ by 2e-7 to
# 8e-6.
TOLERANCE, CANCELLING = 5e-6, {"scale": 4}


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.normal(size=shape) / 2, dtype)


def window(
    size: int = 128, width: int = 64, dtype: str = BF16, lanes: int = 1, heads: int = 2,
    groups: int = 2, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns two blocks. In the last row, a document starts at the second block."""
    kept = np.random.default_rng(0).random((heads, size, size)) < 0.5
    cached, own = (lanes, size, groups, width), (lanes, 2 * size, groups, width)
    return {
        "queries": normal(lanes, 2 * size, heads, width, dtype=dtype),
        "cached": (normal(*cached, dtype=dtype), normal(*cached, dtype=dtype)),
        "keys": normal(*own, dtype=dtype), "values": normal(*own, dtype=dtype),
        "bias": normal(heads, size),
        "cache_mask": jnp.asarray([[True, True]] * (lanes - 1) + [[True, False]]),
        "dropout": DropoutMask(jnp.asarray(kept), scale=1.25),
    } | changes  # fmt: skip


def local(
    size: int, block: int, tokens: int, dtype: str = "float32", lanes: int = 3, heads: int = 4,
    groups: int = 2, width: int = 8,
) -> dict[str, Any]:  # fmt: skip
    """Documents start before the segment, in the cache, and at the segment's second block."""
    starts = jnp.asarray([[-10 * size], [-block], [0]], jnp.int32)[:lanes]
    first = jnp.broadcast_to(starts, (lanes, tokens // block))
    return {
        "queries": normal(lanes, tokens, heads, width, dtype=dtype),
        "cached": tuple(normal(lanes, size, groups, width, dtype=dtype) for _ in range(2)),
        "keys": normal(lanes, tokens, groups, width, dtype=dtype),
        "values": normal(lanes, tokens, groups, width, dtype=dtype),
        "bias": None, "first": first.at[:, 1:].max(jnp.where(starts == 0, block, starts)),
    }  # fmt: skip


def slab(tokens: int = 256, width: int = 64, dtype: str = BF16, heads: int = 2) -> dict[str, Any]:
    x = normal(2, tokens, heads, width, dtype=dtype)
    return {"queries": x, "keys": x, "values": x}


def masked(**sizes: Any) -> dict[str, Any]:
    given = slab(**sizes)
    return given | {"bias": None, "mask": jnp.ones((2, 1, given["keys"].shape[1]), bool)}


def run(function: Callable, given: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """Returns the results and the gradients of their sum with random weights, by name."""
    learned = {
        name: x for name, x in given.items()
        if name in ("queries", "cached", "keys", "values", "bias", "scale") and x is not None
    }  # fmt: skip

    def loss(learned: dict[str, Any]) -> tuple[jax.Array, list]:
        found = jax.tree.leaves(function(**given | learned, **options))
        rng = np.random.default_rng(0)
        weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in found]
        return sum(map(jnp.vdot, weights, found), jnp.zeros(())), found

    gradients, found = jax.jit(jax.grad(loss, has_aux=True))(learned)
    named = gradients | dict(enumerate(found))
    named |= dict(enumerate(named.pop("cached", ()), start=9))
    return {str(name): np.asarray(x, np.float64) for name, x in named.items()}


def assert_close(found: dict, expected: dict) -> None:
    for name, value in expected.items():
        error = np.abs(found[name] - value).max() / np.abs(value).max()
        assert error <= CANCELLING.get(name, 1) * TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.slow_cases("*-False")
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference", KERNEL])
def test_grouped_queries_read_keys_as_if_these_were_repeated(
    implementation: str, normalized: bool
) -> None:
    """Three heads of queries share each of the two heads of keys."""
    scale = jnp.arange(1.0, 7) if normalized else None
    given = window(64, 16, "float32", lanes=2, heads=6, scale=scale)

    def window_part_of_repeated(cached: Any, keys: Any, values: Any, **others: Any) -> Any:
        cached, keys, values = jax.tree.map(
            lambda x: jnp.repeat(x, 3, axis=2), (cached, keys, values)
        )
        return window_part(cached=cached, keys=keys, values=values, **others)

    expected = run(window_part_of_repeated, given, implementation="xla")
    assert_close(run(window_part, given, implementation=implementation), expected)


@pytest.mark.slow_cases("*fsdp*", "*data=3*", "*states*")
@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        (Mesh(data=2, tensor=2, sequence=2), "window"),
        (Mesh(fsdp=4, sequence=2), "window"),
        (Mesh(data=3, tensor=2), "local"),
        # Four devices share two heads of keys, so that every device has both heads.
        (Mesh(data=1, tensor=4), "local"),
        (Mesh(data=2, tensor=2), "masked"),
        (Mesh(fsdp=2), "masked"),
        (Mesh(data=2, tensor=2, sequence=2), "states"),
    ],
    ids=str,
)
def test_devices_that_share_arrays_equal_one(mesh: Mesh, kind: str) -> None:
    function, given = {
        "window": (
            partial(window_part, null_keys=True),
            window(8, 16, "float32", lanes=4, scale=jnp.array([3.0, 7.0])),
        ),
        "local": (local_attention, local(16, 4, 48)),
        "masked": (masked_attention.attend, masked(tokens=24, width=8, dtype="float32")),
        "states": (softmax_attention.attend, slab(24, 8, "float32")),
    }[kind]
    expected = run(function, given, implementation=KERNEL)
    with jax.set_mesh(build(mesh, {})):
        assert_close(run(function, given, implementation=KERNEL), expected)


SEGMENT = "multiple of the window of 16 tokens, not of 40"
WINDOWS = "windows of a multiple of 128 tokens, at most 2048 at once, not of 100"
SLABS = "multiple of 128 queries and of 128 keys, not 100 and 100"
HEADS, FLOATS = "heads of 64, 128 or 256, not of 48", "float32 and bfloat16, not in float16"


@pytest.mark.parametrize(
    ("function", "given", "reason"),
    [
        (window_part, lambda: window(100), WINDOWS),
        (window_part, lambda: window(width=48), HEADS),
        (window_part, lambda: window(dtype="float16"), FLOATS),
        (
            window_part, lambda: window(2048),
            "16 MiB of it at most, not 31 for a window of 2048 with heads of 64 in bfloat16",
        ),
        (masked_attention.attend, lambda: masked(tokens=100), SLABS),
        (masked_attention.attend, lambda: masked(width=48), HEADS),
        (masked_attention.attend, lambda: masked(dtype="float16"), FLOATS),
        (softmax_attention.attend, lambda: slab(100), SLABS),
        (softmax_attention.attend, lambda: slab(width=48), HEADS),
        (softmax_attention.attend, lambda: slab(dtype="float16"), FLOATS),
    ],
)  # fmt: skip
def test_what_the_kernel_of_tpus_does_not_support_is_said(
    function: Callable, given: Callable, reason: str
) -> None:
    with dispatch.use_backend("tpu", V4), pytest.raises(NotImplementedError, match=reason):
        function(**given(), implementation="pallas_tpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dropout": Dropout(jax.random.key(0), 0.1)}, "has no dropout; set its rate to 0"),
        (local(16, 4, 40), SEGMENT),
    ],
)
def test_the_interpreted_kernel_refuses_what_it_does_not_compute(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        local_attention(**local(16, 4, 48) | changes, implementation=KERNEL)


def traced(function: Callable, backend: str, given: dict[str, Any], **options: Any) -> str:
    with dispatch.use_backend(backend):
        return str(jax.make_jaxpr(lambda: function(**given, **options))())


@pytest.mark.parametrize(("backend", "unfit"), [("tpu", 96), ("gpu", 48)])
def test_a_backend_takes_its_kernel_where_it_can_run_and_cpus_refuse_it(
    backend: str, unfit: int
) -> None:
    assert SIGN[backend] in traced(window_part, backend, window())
    assert SIGN[backend] not in traced(window_part, backend, window(unfit))
    with pytest.raises(NotImplementedError, match=f"runs on {backend}, not on cpu"):
        traced(window_part, "cpu", window(), implementation=f"pallas_{backend}")
    for dropout in (None, Dropout(jax.random.key(0), 0.5)):
        assert SIGN[backend] in traced(masked_attention.attend, backend, masked(), dropout=dropout)


@pytest.mark.parametrize(
    ("backend", "size", "block", "tokens", "dtype", "kernel"),
    [
        ("tpu", 2048, 256, 4096, BF16, True),
        ("tpu", 512, 256, 4096, "float32", True),
        ("tpu", 2048, 256, 3072, BF16, True),  # two sub-windows of 1,024
        ("tpu", 2048, 256, 2304, BF16, False),  # no multiple of 512
        ("tpu", 2048, 64, 4096, BF16, False),  # blocks smaller than tiles
        ("tpu", 8192, 8192, 8192, BF16, True),
        ("tpu", 640, 256, 5120, BF16, True),
        ("tpu", 600, 256, 5120, BF16, False),
        ("gpu", 2048, 256, 3072, BF16, True),
        ("gpu", 2048, 256, 4096, "float32", False),
        ("gpu", 2040, 64, 4096, BF16, True),
        ("cpu", 2048, 256, 4096, "float32", False),
    ],
)
def test_auto_selects_a_kernel_for_windows_that_it_has(
    backend: str, size: int, block: int, tokens: int, dtype: str, kernel: bool
) -> None:
    given = local(size, block, tokens, dtype, lanes=1, heads=9, groups=3, width=64)
    assert (SIGN[backend] in traced(local_attention, backend, given)) == kernel
    dropped = given | {"dropout": Dropout(jax.random.key(0), 0.1)}
    assert SIGN[backend] not in traced(local_attention, backend, dropped)


def test_what_the_kernel_gave_is_kept_as_it_is() -> None:
    """The output is saved as unsigned integers, because JAX rounds saved floating-point arrays."""
    given = window()

    def layer(queries: jax.Array) -> jax.Array:
        part = window_part(**given | {"queries": queries}, implementation="pallas_tpu")
        return jnp.sum(jnp.sin(part.output.astype(jnp.float32)))

    kept = jax.grad(jax.checkpoint(layer, policy=remat_policy("products")))
    with dispatch.use_backend("tpu"):
        text = str(jax.make_jaxpr(kept)(given["queries"]))
    assert "name[name=kernel]" in text and "reduce_precision" not in text


def test_a_window_without_room_on_a_chip_is_split_unless_it_has_dropout() -> None:
    given = window(2048)
    with dispatch.use_backend("tpu", V4):
        found = [
            str(jax.make_jaxpr(lambda d=d: window_part(**given | {"dropout": d}))())
            for d in (None, given["dropout"])
        ]
    assert [text.count("pallas_call[") for text in found] == [2, 0]
