"""Tests layers whose tokens attend to all tokens of a memory, and the gate of memorizing layers,
which gated dense-memory layers have, too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import (
    LANES,
    NOWHERE,
    TOKENS,
    WINDOW,
    assert_close,
    inputs,
    kind_of,
    layer_params,
    new_state,
    one_layer,
    read,
)

from brt.config import Model
from brt.config.model import SelfAttention
from brt.layers.state import Given
from brt.memories import DenseMemory, Memorizing
from brt.memories.past_tokens import counts_before

SIZE = 10
MODEL = one_layer(DenseMemory(layers=(0,), size=6))
_GATED = {
    "heads": 4, "head_dim": 4, "positions": "rotary",
    "attention": SelfAttention(kv_heads=2, normalize_qk=False),
}  # fmt: skip
# These layers read their memory through a gate, which is closed at first.
GATED = {
    "memorizing": one_layer(Memorizing(layers=(0,), size=32, neighbors=3, gate="tanh"), **_GATED),
    "dense": one_layer(DenseMemory(layers=(0,), size=SIZE, gate="tanh"), **_GATED),
}
each_gated = pytest.mark.parametrize("model", GATED.values(), ids=GATED)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return layer_params(random_params, MODEL)


@pytest.fixture(scope="module")
def gated_params(random_params: Callable) -> Callable[[Model, float], Any]:
    """Returns random parameters of a layer in which all heads have this value of the gate."""

    def make(model: Model, gate: float = 0.5) -> Any:
        found = layer_params(random_params, model)
        return {**found, "memory_gate": jnp.full((model.heads,), gate)}

    return make


def test_blocks_find_the_entries_of_their_document_that_fit() -> None:
    start = jnp.array([[False, False, False], [True, False, False], [False, True, False]])
    counts = counts_before(jnp.array([2, 5, 9]), start, added=4, size=9)
    np.testing.assert_array_equal(counts, [[2, 6, 9, 9], [0, 4, 8, 9], [9, 0, 4, 8]])
    counts = counts_before(jnp.array([3, 5, 6]), start, added=2, size=6, delay=1)
    np.testing.assert_array_equal(counts, [[3, 5, 6, 6], [0, 0, 2, 4], [6, 0, 0, 2]])


def test_a_memory_of_all_is_a_window_of_all(params: Any) -> None:
    """Without positions, one softmax over the block and the memory equals that of a sliding
    window.
    """
    model = with_settings(MODEL, {"DenseMemory.size": TOKENS})
    wide = dataclasses.replace(MODEL, window=TOKENS)
    assert_close(read(model, params, inputs()).x, read(wide, params, inputs()).x)


def test_empty_places_are_masked_or_count_as_zeros(params: Any) -> None:
    new = new_state(MODEL)
    noise = new._replace(keys=new.keys + 1, values=new.values + 1)
    for masked in (True, False):
        model = with_settings(MODEL, {"Window.mask_empty_cache": masked})
        y, noisy = (read(model, params, inputs(), state).x for state in (new, noise))
        np.testing.assert_array_equal(noisy, y)
    assert np.any(read(MODEL, params, inputs()).x != y), "zeros are looked at"


@pytest.mark.slow_cases("memorizing")
@each_gated
def test_tokens_beyond_the_window_are_read_by_their_content(
    model: Model, gated_params: Callable
) -> None:
    """The order of the memory's tokens has no effect, although the window has rotary positions."""
    params = gated_params(model)
    state = read(model, params, inputs(1)[:, :WINDOW]).state
    old = state.keys.shape[2] - WINDOW
    order = np.r_[np.random.default_rng(0).permutation(old), old : old + WINDOW]
    # All tokens of the memory belong to the document.
    noise = jnp.asarray(np.random.default_rng(1).normal(size=state.keys.shape), jnp.float32)
    full = state._replace(keys=noise, values=noise, length=jnp.full(LANES, state.keys.shape[2]))
    moved = full._replace(keys=full.keys[:, :, order], values=full.values[:, :, order])
    block = inputs()[:, :WINDOW]
    y = read(model, params, block, full).x
    assert_close(read(model, params, block, moved).x, y)
    other = full._replace(values=full.values.at[:, :, :old].multiply(2))
    assert np.abs(read(model, params, block, other).x - y).max() > 0.01


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("attend_to_self", [True, False])
def test_the_memory_stands_right_behind_the_window(
    attend_to_self: bool, gated_params: Callable
) -> None:
    """The token that has just left the window is read as in a window that is one token longer."""
    settings = {"Window.block": 1, "Window.attend_to_self": attend_to_self}
    gated = with_settings(GATED["dense"], settings)
    longer = with_settings(gated, {"window": WINDOW + 1, "DenseMemory.layers": ()})
    params = gated_params(gated, 100.0)
    tokens = inputs()[:, : WINDOW + (1 if attend_to_self else 2)]
    expected = read(longer, {"tokens": params["tokens"]}, tokens).x
    assert_close(read(gated, params, tokens).x, expected)
    shut = read(gated, {**params, "memory_gate": 0 * params["memory_gate"]}, tokens).x
    assert np.abs(shut - expected)[:, -1].max() > 0.01


@pytest.mark.slow  # The tests of what stands behind the window and of a memory of all show both.
def test_an_open_gate_and_no_positions_are_the_layer_without_a_gate(gated_params: Callable) -> None:
    """Both layers then take one softmax over the block and the memory."""
    gated = dataclasses.replace(GATED["dense"], positions="none")
    dense, params = with_settings(gated, {"DenseMemory.gate": "none"}), gated_params(gated, 100.0)
    expected = read(dense, {"tokens": params["tokens"]}, inputs()).x
    assert_close(read(gated, params, inputs()).x, expected)


@pytest.mark.slow_cases("memorizing")
@each_gated
def test_sinks_are_not_read_a_second_time(model: Model, gated_params: Callable) -> None:
    """The sinks are the first block of the document, so that the memory has no other token for the
    second block.
    """
    model = with_settings(model, {"Window.sinks": WINDOW})
    shut, wide = (read(model, gated_params(model, gate), inputs()).x for gate in (0.0, 100.0))
    assert_close(wide[:, : 2 * WINDOW], shut[:, : 2 * WINDOW])
    assert np.abs(wide[:, -WINDOW:] - shut[:, -WINDOW:]).max() > 0.01


@pytest.mark.parametrize(
    ("model", "has_positions"),
    [
        (GATED["memorizing"], True),
        (GATED["dense"], True),
        (one_layer(Memorizing(layers=(0,), size=32, neighbors=3)), False),
    ],
    ids=[*GATED, "sigmoid"],
)
def test_a_gate_per_head_begins_at_zero_and_the_sigmoid_leaves_no_positions(
    model: Model, has_positions: bool
) -> None:
    model = dataclasses.replace(model, positions="t5")
    given = Given(new_state(model), document_start=jnp.asarray(NOWHERE))
    layer, key = kind_of(model).module(model), jax.random.key(0)
    gate = layer.init(key, method=lambda layer: layer.memory_gate)["params"]["memory_gate"]
    np.testing.assert_array_equal(gate.value, np.zeros(model.heads))
    tree = jax.eval_shape(layer.init, key, inputs(), given)["params"]
    assert ("relative_bias" in tree["tokens"]) == has_positions
