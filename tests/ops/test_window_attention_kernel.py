"""Tests the kernels of window attention, interpreted, against plain XLA and the reference.

Results must not depend on the tiles, or on the devices that share an array.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.layers.basic import remat_policy
from brt.ops import dispatch
from brt.ops.dropout import DropoutMask
from brt.ops.window_attention import (
    segment_part,
    window_part,
)

# Relative to the largest magnitude of an array. Sums have a thousand terms that cancel, and are
# taken in another order.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 2e-3}
# The gradient of a scale is one sum over all tokens, whose terms cancel. With six seeds, the
# results of one device and of several differ by 2e-7 to 8e-6, however the kernel is written.
CANCELLING = {"scale": 4}
ARRAYS = ("queries", "cached", "keys", "values", "bias", "scale")


def inputs(lanes: int, window: int, width: int = 16, dtype: str = "float32") -> dict[str, Any]:
    """Returns two blocks of two heads. In the last lane, a document starts at the second block."""
    rng = np.random.default_rng(window)
    heads, tokens = 2, 2 * window

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    return {
        "queries": normal(lanes, tokens, heads, width, scale=width**-0.5),
        "cached": (normal(lanes, window, heads, width), normal(lanes, window, heads, width)),
        "keys": normal(lanes, tokens, heads, width),
        "values": normal(lanes, tokens, heads, width),
        "bias": jnp.asarray(rng.normal(size=(heads, window)), jnp.float32),
        "cache_mask": jnp.asarray([[True, True]] * (lanes - 1) + [[True, False]]),
        "scale": None,
        "dropout": DropoutMask(jnp.asarray(rng.random((heads, window, window)) < 0.5), scale=1.25),
    }


def run(function: Callable, given: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """Returns both results and the gradients of their sum with random weights, by name."""
    return compiled(function, given, **options)()


def compiled(
    function: Callable, given: dict[str, Any], **options: Any
) -> Callable[[], dict[str, np.ndarray]]:
    """Returns a function without arguments that returns the results of `run` and compiles only
    once.
    """

    def loss(learned: dict[str, Any]) -> tuple[jax.Array, tuple]:
        y, lse = function(**given | learned, **options)
        rng = np.random.default_rng(0)
        weights = (jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (y, lse))
        return sum(jnp.sum(w * x) for w, x in zip(weights, (y, lse), strict=True)), (y, lse)

    learned = {name: given[name] for name in ARRAYS if given[name] is not None}
    step = jax.jit(jax.grad(loss, has_aux=True))

    def computed() -> dict[str, np.ndarray]:
        gradients, (y, lse) = step(learned)
        gradients["cached keys"], gradients["cached values"] = gradients.pop("cached")
        found = {"output": y, "lse": lse} | gradients
        return {name: np.asarray(x, np.float64) for name, x in found.items()}

    return computed


def assert_close(found: dict, expected: dict, dtype: str = "float32") -> None:
    for name, value in expected.items():
        error = np.abs(found[name] - value).max() / np.abs(value).max()
        assert error <= CANCELLING.get(name, 1) * TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.slow_cases("*-False")
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference", "pallas_interpret"])
def test_grouped_queries_read_keys_as_if_these_were_repeated(
    implementation: str, normalized: bool
) -> None:
    """Three heads of queries share each of the two heads of keys."""
    given, members, window = inputs(2, 64), 3, 64
    rng = np.random.default_rng(1)
    heads = 2 * members
    given |= {
        "queries": jnp.asarray(rng.normal(size=(2, 2 * window, heads, 16)), jnp.float32) / 4,
        "bias": jnp.asarray(rng.normal(size=(heads, window)), jnp.float32),
        "dropout": DropoutMask(jnp.asarray(rng.random((heads, window, window)) < 0.5), scale=1.25),
        "scale": jnp.arange(1.0, 1 + heads) if normalized else None,
    }

    def repeated(x: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, members, axis=2), x)

    def window_part_of_repeated(cached: Any, keys: Any, values: Any, **others: Any) -> Any:
        return window_part(
            cached=repeated(cached), keys=repeated(keys), values=repeated(values), **others
        )

    expected = run(window_part_of_repeated, given, implementation="xla")
    assert_close(run(window_part, given, implementation=implementation), expected)


@pytest.mark.slow_cases("*1-pallas_interpret*")
@pytest.mark.parametrize(
    ("mesh", "implementation"),
    [
        (Mesh(data=2, tensor=2, sequence=2), "pallas_interpret"),
        (Mesh(fsdp=4, sequence=2), "pallas_interpret"),
    ],
)
def test_devices_that_share_a_segment_equal_one(mesh: Mesh, implementation: str) -> None:
    given = inputs(4, 8) | {"scale": jnp.array([3.0, 7.0])}

    part = functools.partial(segment_part, implementation=implementation, null_keys=True)
    expected = run(part, given)
    with jax.set_mesh(build(mesh, {})):
        assert_close(run(part, given), expected)


@pytest.mark.parametrize(
    ("backend", "changed", "reason"),
    [
        (
            "tpu",
            {"window": 100},
            "windows of a multiple of 128 tokens, at most 2048 at once, not of 100",
        ),
        ("tpu", {"width": 48}, "has heads of 64, 128 or 256, not of 48"),
        ("tpu", {"dtype": "float16"}, "computes in float32 and bfloat16, not in float16"),
    ],
)
def test_what_a_kernel_does_not_support_is_said(
    backend: str, changed: dict[str, Any], reason: str
) -> None:
    given = inputs(1, **{"window": 128, "width": 64, "dtype": "bfloat16"} | changed)
    with dispatch.use_backend(backend), pytest.raises(NotImplementedError, match=reason):
        window_part(**given, implementation=f"pallas_{backend}")


@pytest.mark.parametrize(("backend", "unfit"), [("tpu", 96), ("gpu", 48)])
def test_a_backend_takes_its_kernel_where_it_can_run_and_cpus_refuse_it(
    backend: str, unfit: int
) -> None:
    def traced(window: int, backend: str, **options: str) -> str:
        given = inputs(1, window, width=64, dtype="bfloat16")
        with dispatch.use_backend(backend):
            return str(jax.make_jaxpr(lambda: window_part(**given, **options))())

    is_kernel = {"tpu": "pallas_call", "gpu": "copy_gmem_to_smem"}[backend]
    assert is_kernel in traced(128, backend) and is_kernel not in traced(unfit, backend)
    with pytest.raises(NotImplementedError, match=f"runs on {backend}, not on cpu"):
        traced(128, "cpu", implementation=f"pallas_{backend}")


def test_what_the_kernel_gave_is_kept_as_it_is() -> None:
    """The output is saved as unsigned integers, because JAX rounds saved floating-point arrays."""
    given = inputs(1, window=128, width=64, dtype="bfloat16")

    def layer(queries: jax.Array) -> jax.Array:
        part = window_part(**given | {"queries": queries}, implementation="pallas_tpu")
        return jnp.sum(jnp.sin(part.output.astype(jnp.float32)))

    kept = jax.grad(jax.checkpoint(layer, policy=remat_policy("products")))
    with dispatch.use_backend("tpu"):
        traced = str(jax.make_jaxpr(kept)(given["queries"]))
    assert "name[name=kernel]" in traced and "reduce_precision" not in traced


def test_what_a_chip_has_no_room_for_is_said() -> None:
    given = inputs(1, window=2048, width=64, dtype="bfloat16")
    v4 = SimpleNamespace(device_kind="TPU v4")
    reason = "16 MiB of it at most, not 31 for a window of 2048 with heads of 64 in bfloat16"
    with dispatch.use_backend("tpu", v4), pytest.raises(NotImplementedError, match=reason):
        window_part(**given, implementation="pallas_tpu")


def test_a_window_without_room_on_a_chip_is_split_unless_it_has_dropout() -> None:
    given = inputs(1, window=2048, width=64, dtype="bfloat16") | {"dropout": None, "bias": None}
    v4 = SimpleNamespace(device_kind="TPU v4")

    def kernels(**options: bool) -> int:
        """Returns how many kernels compute the attention."""
        with dispatch.use_backend("tpu", v4):
            traced = jax.make_jaxpr(lambda: window_part(**given, **options))()
        return str(traced).count("pallas_call[")

    assert kernels() == 2
    given |= {"dropout": DropoutMask(jnp.ones((2, 2048, 2048), bool), scale=1.0)}
    assert kernels() == 0
