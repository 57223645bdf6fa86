import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Model
from brt.errors import ConfigError
from brt.layers.kinds import KINDS
from brt.memories import DenseMemory
from brt.memories.dense_memory import DenseMemoryLayer, DenseState, new_dense_state
from brt.models.flops import forward_flops_per_token

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS = 2, 4, 4
TOKENS = WINDOW * BLOCKS
MODEL = Model(
    layers=1,
    model_dim=16,
    heads=2,
    head_dim=8,
    mlp_dim=32,
    window=WINDOW,
    vocab_size=8,
    kinds=(DenseMemory(layers=(0,), size=6),),
)
NOWHERE = np.zeros((LANES, BLOCKS), bool)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return jax.tree.map(lambda x: x[0], random_params(MODEL)["stack"]["dense_memory_0"])


def inputs(seed: int = 0) -> jax.Array:
    shape = (LANES, TOKENS, MODEL.model_dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def new_state() -> DenseState:
    return new_dense_state(MODEL, LANES, jnp.dtype("float32"))


@functools.cache
def compiled(model: Model) -> Callable:
    return jax.jit(DenseMemoryLayer(model).apply)


def read(
    params: Any, x: jax.Array, state: DenseState, start: np.ndarray = NOWHERE,
    model: Model = MODEL,
) -> tuple:  # fmt: skip
    """Returns the output and the next state of the layer for a segment."""
    start = jnp.asarray(start)
    output = compiled(model)({"params": params}, x, state=state, document_start=start)
    return output[:2]


def test_a_token_reads_its_block_and_as_many_tokens_before_it_as_there_are_places(
    params: Any,
) -> None:
    start = NOWHERE.copy()
    start[1, 2] = True
    base, state = read(params, inputs(), new_state(), start)
    changed = [
        np.any(read(params, inputs().at[:, t].add(1.0), new_state(), start)[0] != base, -1)
        for t in range(TOKENS)
    ]
    # `depends` is [lane, reading token, token that is read].
    depends, place = np.stack(changed, axis=2), np.arange(TOKENS)
    first = place // WINDOW * WINDOW - MODEL.of(DenseMemory).size
    expected = (place[None] <= place[:, None]) & (place[None] >= first[:, None])
    np.testing.assert_array_equal(depends[0], expected)
    document = place // WINDOW >= 2
    np.testing.assert_array_equal(depends[1], expected & (document[:, None] == document[None]))
    assert state.length.tolist() == [6, 6]


def test_a_memory_of_all_is_a_window_of_all(params: Any) -> None:
    """Without positions, one softmax over the block and the memory equals that of a sliding
    window.
    """
    model = with_settings(MODEL, {"Memorizing.size": TOKENS, "DenseMemory.size": TOKENS})
    state = new_dense_state(model, LANES, jnp.dtype("float32"))
    y, _ = read(params, inputs(), state, model=model)
    wide = dataclasses.replace(MODEL, window=TOKENS)
    expected, _ = read(params, inputs(), new_state(), NOWHERE[:, :1], wide)
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)


def test_empty_places_are_masked_or_count_as_zeros(params: Any) -> None:
    noise = new_state()._replace(keys=new_state().keys + 1, values=new_state().values + 1)
    for masked in (True, False):
        model = with_settings(MODEL, {"Window.mask_empty_cache": masked})
        y, noisy = (read(params, inputs(), s, model=model)[0] for s in (new_state(), noise))
        np.testing.assert_array_equal(noisy, y)
    assert np.any(read(params, inputs(), new_state())[0] != y), "zeros are looked at"


def test_it_has_a_memory_and_no_cache_and_its_arithmetic_is_counted() -> None:
    assert set(KINDS["dense_memory"].parts) == {"memory"}
    base = Model(vocab_size=32000)
    dense = with_settings(base, {"DenseMemory.layers": (5,), "DenseMemory.size": 8192})
    found = forward_flops_per_token(dense) - forward_flops_per_token(base)
    assert found == 4 * 1024 * (8192 + 256 - 512)
    with pytest.raises(ConfigError, match=r"DenseMemory.layers = \(0,\) cannot"):
        with_settings(MODEL, {"layers": 2, "Recurrence.layers": (1,), "feedback": True})
