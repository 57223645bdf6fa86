"""Compares the TPU kernel of the states' attention, interpreted, with plain XLA and its
autodiff.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import WATCHED, assert_close, both_passes

from brt.ops.normalization import l2_normalize
from brt.ops.recurrent_attention import pallas_tpu, xla
from brt.ops.recurrent_attention.cell import TokenKV

HEADS, SIZE = 2, 8


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
    expected = both_passes(lambda x: read(*x, cache_mask, **options), wide)
    assert_close(both_passes(lambda x: kernel(*x, cache_mask), arrays), expected, tolerance)


@pytest.mark.slow
def test_reads_nothing_unwritten_and_repeats_bit_by_bit(capfd: pytest.CaptureFixture) -> None:
    arrays, cache_mask = inputs(states=48)  # The kernel reads 48 states in three tiles.
    options = {"normalize_qk": True, "null_keys": True}
    kernel = partial(pallas_tpu.state_attention, interpret=WATCHED, **options)
    read = partial(normalizing(xla.state_attention), **options)
    expected = both_passes(lambda x: read(*x, cache_mask), arrays)
    found = both_passes(lambda x: kernel(*x, cache_mask), arrays, repeat=True)
    assert_close(found, expected, 5e-6)
    assert "RACE" not in capfd.readouterr().out


def test_states_stay_float32_where_tokens_are_bfloat16() -> None:
    run, (*arrays, keys, values), _ = cases.recurrent("lstm", "dual")
    narrow = (x.astype(jnp.bfloat16) for x in (keys, values))
    after, memory = jax.eval_shape(lambda *x: run("xla", *x), *arrays, *narrow)
    assert after.dtype == jnp.float32 and memory.keys.dtype == memory.values.dtype == jnp.bfloat16
