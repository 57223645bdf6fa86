"""Compares the TPU kernel of the states' attention, interpreted, with plain XLA and its
autodiff.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.normalization import l2_normalize
from brt.ops.recurrent_attention import CellWeights, pallas_tpu, state_scan, xla
from brt.ops.recurrent_attention.cell import TokenKV

HEADS, SIZE = 2, 8
WATCHED = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)


V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.


def inputs(
    lanes: int = 2, states: int = 24, window: int = 16, dtype: str = "float32"
) -> tuple[list[Any], jax.Array]:
    """Returns the arrays that the states attend to, and the mask of lanes that may read the cached
    block.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    before, own = (TokenKV(*(normal(lanes, HEADS, window, SIZE) for _ in range(2))) for _ in "ab")
    scales = jnp.asarray(rng.uniform(0.5, 2.0, size=(2, HEADS)), jnp.float32)
    cache_mask = jnp.arange(lanes) % 2 == 0
    return [normal(lanes, states, 4, HEADS, SIZE), scales, before, own], cache_mask


def both_passes(read: Callable, arrays: list[Any], cache_mask: jax.Array) -> list[np.ndarray]:
    """Returns the outputs of a read function and the gradients of all its inputs."""

    @jax.jit
    def passes(*arrays: Any) -> Any:
        outputs, backward = jax.vjp(lambda *x: read(*x, cache_mask), *arrays)
        return outputs, backward(jax.tree.map(lambda x: jnp.sin(3 * x), outputs))

    return [np.asarray(x, np.float64) for x in jax.tree.leaves(passes(*arrays))]


def normalizing(read: Callable) -> Callable:
    """Returns `read` with a normalization of the tokens' keys before it."""

    def prepared(
        projected: Any, scales: Any, before: TokenKV, own: TokenKV, *others: Any, **options: Any
    ) -> Any:
        both = (block._replace(keys=l2_normalize(block.keys)) for block in (before, own))
        return read(projected, scales, *both, *others, **options)

    return prepared


@pytest.mark.slow_cases("bfloat16-0.03-1-*")
@pytest.mark.slow_cases("bfloat16-0.03-3-True-True", "float32-5e-06-3-True-True")
@pytest.mark.parametrize(
    ("lanes", "normalize_qk", "null_keys"),
    [(1, False, False), (3, True, True), pytest.param(3, True, False, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", 3e-2)])
def test_equals_plain_xla_in_float32(
    dtype: str, tolerance: float, lanes: int, normalize_qk: bool, null_keys: bool
) -> None:
    """The tolerance is relative to the largest magnitude; plain XLA computes in float32."""
    arrays, cache_mask = inputs(lanes, dtype=dtype)
    options = {"normalize_qk": normalize_qk, "null_keys": null_keys}
    kernel = partial(pallas_tpu.state_attention, interpret=True, **options)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    read = normalizing(xla.state_attention) if normalize_qk else xla.state_attention
    expected = both_passes(partial(read, **options), wide, cache_mask)
    for found, wanted in zip(both_passes(kernel, arrays, cache_mask), expected, strict=True):
        assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.slow
def test_reads_nothing_unwritten_and_repeats_bit_by_bit(capfd: pytest.CaptureFixture) -> None:
    arrays, cache_mask = inputs(states=48)  # The kernel reads 48 states in three tiles.
    options = {"normalize_qk": True, "null_keys": True}
    kernel = partial(pallas_tpu.state_attention, interpret=WATCHED, **options)
    first, again = (both_passes(kernel, arrays, cache_mask) for _ in range(2))
    expected = both_passes(partial(normalizing(xla.state_attention), **options), arrays, cache_mask)
    for found, repeated, wanted in zip(first, again, expected, strict=True):
        np.testing.assert_array_equal(found, repeated)
        assert np.abs(found - wanted).max() <= 5e-6 * np.abs(wanted).max()
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow_cases("mesh0")
@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2, sequence=2), Mesh(fsdp=4, tensor=2)])
def test_devices_read_each_for_itself(mesh: Mesh) -> None:
    arrays, cache_mask = inputs(lanes=4)

    def loss(*arrays: Any) -> jax.Array:
        read = partial(pallas_tpu.state_attention, interpret=True)
        found = read(*arrays, cache_mask, normalize_qk=True, null_keys=False)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(found))

    def run() -> list[Any]:
        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arrays))

    expected = run()
    with jax.set_mesh(build(mesh, {})):
        found = run()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "changes", "reason"),
    [
        ((100, 128, 64), {}, "multiple of 128 states and of 128 tokens, not 100 and 128"),
        ((128, 100, 64), {}, "multiple of 128 states and of 128 tokens, not 128 and 100"),
        ((128, 128, 48), {}, "heads of 64, 128 or 256, not of 48"),
        ((1024, 1024, 128), {}, "14 MiB of it at most, not 24"),
        ((128, 128, 64), {"attention": "xla"}, "not by 'xla' of softmax_attention"),
        ((128, 128, 64), {"dtype": "float16"}, "float32 and bfloat16, not in float16"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(
    shape: tuple[int, int, int], changes: dict[str, str], reason: str
) -> None:
    (states, window, size), dtype = shape, changes.pop("dtype", "bfloat16")
    tokens, flags = jnp.zeros((1, window, 1, size), dtype), jnp.ones((1, 1), bool)
    vectors, of_heads = jnp.zeros((1, states, size)), jnp.ones((1,))
    weights = CellWeights(
        vectors[0, 0], vectors[0], *[jnp.zeros((size, 1, size))] * 4, of_heads, of_heads
    )
    with dispatch.use_backend("tpu", V4), pytest.raises(NotImplementedError, match=reason):
        state_scan(
            weights, vectors[0], vectors, (tokens, tokens), tokens, tokens, flags, flags,
            implementation="pallas_tpu", **changes,
        )  # fmt: skip
