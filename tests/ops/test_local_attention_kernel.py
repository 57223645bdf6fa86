"""Compares the kernels for windows that differ from the block, interpreted, with the reference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.errors import UnsupportedError
from brt.ops import dispatch
from brt.ops.dropout import Dropout
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention import local_attention

# Relative to the largest magnitude of an array. The kernels take sums in another order.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}
ARRAYS = ("queries", "cached", "keys", "values", "bias", "scale")
LANES, HEADS, GROUPS, WIDTH = 3, 4, 2, 8


def inputs(window: int, block: int, tokens: int, dtype: str = "float32") -> dict[str, Any]:
    """Returns inputs of three lanes, in which two heads of queries share a head of keys.

    In the first lane, the document began long before the segment, and the cache is full. In the
    second, one block of the cache belongs to the document, and another document starts inside of
    the segment. In the third, the cache is empty, and a document starts at the second block.
    """
    rng = np.random.default_rng(window)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    blocks = tokens // block
    first = np.array([[-10 * window], [-block], [0]]) * np.ones((1, blocks), int)
    first[1, blocks // 2 + 1 :] = (blocks // 2 + 1) * block
    first[2, 1:] = block
    keys, cached = (LANES, tokens, GROUPS, WIDTH), (LANES, window, GROUPS, WIDTH)
    return {
        "queries": normal(LANES, tokens, HEADS, WIDTH, scale=WIDTH**-0.5),
        "cached": (normal(*cached), normal(*cached)),
        "keys": normal(*keys),
        "values": normal(*keys),
        "bias": jnp.asarray(rng.normal(size=(HEADS, window)), jnp.float32),
        "scale": None,
        "first": jnp.asarray(first, jnp.int32),
    }


def run(
    given: dict[str, Any], attend: Callable[..., Any] = local_attention, **options: Any
) -> dict[str, np.ndarray]:
    """Returns output, log-sum-exp, and the gradients of their sum with random weights, by name."""

    def loss(learned: dict[str, Any]) -> tuple[jax.Array, AttentionPart]:
        part = AttentionPart(*attend(**given | learned, **options))
        rng = np.random.default_rng(0)
        weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in part]
        return sum(map(jnp.vdot, weights, part), jnp.zeros(())), part

    learned = {name: given[name] for name in ARRAYS if given[name] is not None}
    gradients, part = jax.jit(jax.grad(loss, has_aux=True))(learned)
    gradients["cached keys"], gradients["cached values"] = gradients.pop("cached")
    found = part._asdict() | gradients
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def assert_close(found: dict, expected: dict, dtype: str = "float32") -> None:
    for name, value in expected.items():
        error = np.abs(found[name] - value).max() / np.abs(value).max()
        assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"


def test_a_token_sees_nothing_of_other_documents() -> None:
    """Keys and values of earlier documents are so large that any weight on them changes the
    output.
    """
    given = inputs(16, 4, 48) | {"bias": None}
    hidden = np.arange(-16, 48)[None] < np.asarray(given["first"])[:, -1:]
    keys, values = (
        np.concatenate([old, new], axis=1)
        for old, new in zip(given["cached"], (given["keys"], given["values"]), strict=True)
    )
    keys, values = (np.where(hidden[..., None, None], 1e4, x) for x in (keys, values))
    last = np.s_[:, -8:]
    expected = local_attention(**given, implementation="reference")
    given |= {
        "cached": (jnp.asarray(keys[:, :16]), jnp.asarray(values[:, :16])),
        "keys": jnp.asarray(keys[:, 16:]),
        "values": jnp.asarray(values[:, 16:]),
    }
    found = local_attention(**given, implementation="pallas_interpret")
    np.testing.assert_allclose(found.output[last], expected.output[last], atol=1e-5)
    np.testing.assert_allclose(found.lse[last], expected.lse[last], atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "window", "block", "tokens", "dtype", "chosen"),
    [
        ("tpu", 2048, 256, 4096, "bfloat16", "pallas_tpu"),
        ("tpu", 512, 256, 4096, "float32", "pallas_tpu"),
        ("tpu", 2048, 256, 3072, "bfloat16", "pallas_tpu"),  # two sub-windows of 1,024
        ("tpu", 2048, 256, 2304, "bfloat16", "xla"),  # no multiple of 512
        ("tpu", 2048, 64, 4096, "bfloat16", "xla"),  # blocks smaller than tiles
        ("tpu", 4096, 256, 4096, "bfloat16", "pallas_tpu"),
        ("tpu", 8192, 8192, 8192, "bfloat16", "pallas_tpu"),
        ("tpu", 640, 256, 5120, "bfloat16", "pallas_tpu"),
        ("tpu", 600, 256, 5120, "bfloat16", "xla"),
        ("gpu", 2048, 256, 3072, "bfloat16", "pallas_gpu"),
        ("gpu", 2048, 256, 4096, "float32", "xla"),
        ("gpu", 2040, 64, 4096, "bfloat16", "pallas_gpu"),
        ("cpu", 2048, 256, 4096, "float32", "xla"),
    ],
)
def test_auto_selects_a_kernel_for_sizes_that_it_has(
    backend: str, window: int, block: int, tokens: int, dtype: str, chosen: str
) -> None:
    shape = jax.ShapeDtypeStruct
    q, k, cached = (
        shape((1, length, heads, 64), dtype)
        for length, heads in ((tokens, 9), (tokens, 3), (window, 3))
    )
    first = shape((1, tokens // block), "int32")

    def chosen_for(dropout: Dropout | None) -> str:
        jaxpr = str(
            jax.make_jaxpr(
                lambda q, k, cached, first: local_attention(
                    q, (cached, cached), k, k, None, first, dropout
                )
            )(q, k, cached, first)
        )
        return "xla" if "pallas_call" not in jaxpr else f"pallas_{backend}"

    with dispatch.use_backend(backend):
        assert chosen_for(None) == chosen
        assert chosen_for(Dropout(jax.random.key(0), 0.1)) == "xla"


def test_a_kernel_that_is_named_refuses_what_it_does_not_compute() -> None:
    given = inputs(16, 4, 48)
    with pytest.raises(UnsupportedError, match="has no dropout; set its rate to 0"):
        local_attention(
            **given, dropout=Dropout(jax.random.key(0), 0.1), implementation="pallas_interpret"
        )
    given = inputs(16, 4, 40)
    with pytest.raises(UnsupportedError, match="a multiple of the window of 16 tokens, not of 40"):
        local_attention(**given, implementation="pallas_interpret")


@pytest.mark.slow_cases("Mesh(data=3*")
@pytest.mark.parametrize("mesh", [Mesh(data=3, tensor=2), Mesh(data=1, tensor=4)], ids=str)
def test_devices_compute_their_own_lanes_and_heads(mesh: Mesh) -> None:
    """In the second mesh, four devices share two heads of keys, so that every device has both
    heads.
    """
    given = inputs(16, 4, 48) | {"bias": None}
    expected = run(given, implementation="reference")
    with jax.set_mesh(build(mesh, {})):
        assert_close(run(given, implementation="pallas_interpret"), expected)
