"""Tests sliding-window layers that read a memory through a gate, which is closed at first.

The layers are memorizing layers and dense-memory layers with a tanh gate.
"""

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
from brt.config.model import SelfAttention
from brt.errors import ConfigError
from brt.layers import kinds
from brt.memories.dense_memory import DenseMemoryLayer, new_dense_state
from brt.models.flops import forward_flops_per_token

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS, SIZE = 2, 4, 4, 10
TOKENS = WINDOW * BLOCKS
PLAIN = Model(
    layers=1, model_dim=16, heads=4, head_dim=4, mlp_dim=32, window=WINDOW,
    vocab_size=8, positions="rotary", attention=SelfAttention(kv_heads=2, normalize_qk=False),
)  # fmt: skip
SETTINGS = {
    "memorizing": {
        "Memorizing.layers": (0,), "Memorizing.size": 32, "Memorizing.neighbors": 3,
        "Memorizing.gate": "tanh",
    },
    "gated_dense_memory": {
        "DenseMemory.layers": (0,), "DenseMemory.size": SIZE, "DenseMemory.gate": "tanh",
    },
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", SETTINGS)


def model_of(kind: str, **settings: Any) -> Model:
    return with_settings(PLAIN, {**SETTINGS[kind], **settings})


def inputs(seed: int = 0) -> jax.Array:
    shape = (LANES, TOKENS, PLAIN.model_dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def compiled(model: Model) -> Callable:
    (kind,) = model.layer_types
    return jax.jit(kinds.of(kind).module(model).apply)


def params_of(random_params: Callable, model: Model, gate: float = 0.5) -> Any:
    """Returns random parameters of the layer in which all heads have this value of the gate."""
    (kind,) = model.layer_types
    params = jax.tree.map(lambda x: x[0], random_params(model)["stack"][f"{kind}_0"])
    return {**params, "memory_gate": jnp.full((model.heads,), gate)}


def read(params: Any, model: Model, x: jax.Array, state: Any = None) -> tuple:
    """Returns the output and the next state of the layer for a segment, by default from a new
    state.
    """
    (kind,) = model.layer_types
    if state is None:
        state = kinds.of(kind).new_state(model, LANES, jnp.dtype("float32"))
    start = jnp.zeros((LANES, x.shape[1] // model.block_length), bool)
    return compiled(model)({"params": params}, x, state=state, document_start=start)[:2]


@each_kind
def test_tokens_beyond_the_window_are_read_by_their_content(
    kind: str, random_params: Callable
) -> None:
    """The order of the memory's tokens has no effect, although the window has rotary positions."""
    model = model_of(kind)
    params = params_of(random_params, model)
    _, state = read(params, model, inputs(1))
    old = state.keys.shape[2] - WINDOW
    order = np.r_[np.random.default_rng(0).permutation(old), old : old + WINDOW]
    # All tokens of the memory belong to the document.
    noise = jnp.asarray(np.random.default_rng(1).normal(size=state.keys.shape), jnp.float32)
    full = state._replace(keys=noise, values=noise, length=jnp.full(LANES, state.keys.shape[2]))
    moved = full._replace(keys=full.keys[:, :, order], values=full.values[:, :, order])
    block = inputs()[:, :WINDOW]
    y, _ = read(params, model, block, full)
    np.testing.assert_allclose(read(params, model, block, moved)[0], y, atol=TOLERANCE)
    other = full._replace(values=full.values.at[:, :, :old].multiply(2))
    assert np.abs(read(params, model, block, other)[0] - y).max() > 0.01


@pytest.mark.parametrize("attend_to_self", [True, False])
def test_the_memory_stands_right_behind_the_window(
    attend_to_self: bool, random_params: Callable
) -> None:
    """The token that has just left the window is read as in a window that is one token longer."""
    gated = model_of(
        "gated_dense_memory", **{"Window.block": 1, "Window.attend_to_self": attend_to_self}
    )
    longer = with_settings(
        PLAIN, {"window": WINDOW + 1, "Window.block": 1, "Window.attend_to_self": attend_to_self}
    )
    params = params_of(random_params, gated, gate=100.0)
    tokens = inputs()[:, : WINDOW + (1 if attend_to_self else 2)]
    expected, _ = read({"tokens": params["tokens"]}, longer, tokens)
    np.testing.assert_allclose(read(params, gated, tokens)[0], expected, atol=TOLERANCE)
    shut, _ = read({**params, "memory_gate": 0 * params["memory_gate"]}, gated, tokens)
    assert np.abs(shut - expected)[:, -1].max() > 0.01


def test_an_open_gate_and_no_positions_are_the_layer_without_a_gate(
    random_params: Callable,
) -> None:
    """Both layers then take one softmax over the block and the memory."""
    gated = model_of("gated_dense_memory", positions="none")
    dense = with_settings(gated, {"DenseMemory.gate": "none"})
    params = params_of(random_params, gated, gate=100.0)
    y, _ = read(params, gated, inputs())
    start = jnp.zeros((LANES, BLOCKS), bool)
    expected = jax.jit(DenseMemoryLayer(dense).apply)(
        {"params": {"tokens": params["tokens"]}}, inputs(),
        state=new_dense_state(dense, LANES, jnp.dtype("float32")), document_start=start,
    )  # fmt: skip
    np.testing.assert_allclose(y, expected.x, atol=TOLERANCE)


@each_kind
def test_sinks_are_not_read_a_second_time(kind: str, random_params: Callable) -> None:
    """The sinks are the first block of the document, so that the memory has no other token for the
    second block.
    """
    model = model_of(kind, **{"Window.sinks": WINDOW})
    shut, wide = (
        read(params_of(random_params, model, gate), model, inputs())[0] for gate in (0.0, 100.0)
    )
    second = 2 * WINDOW
    np.testing.assert_allclose(wide[:, :second], shut[:, :second], atol=TOLERANCE)
    assert np.abs(wide[:, -WINDOW:] - shut[:, -WINDOW:]).max() > 0.01


@each_kind
def test_a_gate_per_head_begins_closed_and_the_window_has_positions(kind: str) -> None:
    model = model_of(kind, positions="t5")
    module, start = kinds.of(kind).module(model), jnp.zeros((LANES, BLOCKS), bool)
    state = kinds.of(kind).new_state(model, LANES, jnp.dtype("float32"))
    init = jax.eval_shape(module.init, jax.random.key(0), inputs(), state=state,
                          document_start=start)["params"]  # fmt: skip
    assert init["memory_gate"].value.shape == (model.heads,)
    assert "relative_bias" in init["tokens"]


def test_the_memory_beyond_the_window_is_counted() -> None:
    """The counted products are those of query heads with keys and of weights with values."""
    found = forward_flops_per_token(model_of("gated_dense_memory"))
    plain = forward_flops_per_token(PLAIN)
    # A token reads on average 2.5 tokens of its block, rounded down to 2.
    assert found - plain == 4 * 16 * (SIZE - WINDOW + 2)
    found = forward_flops_per_token(model_of("memorizing"))
    assert found - plain == 2 * 16 * 32 + 4 * 16 * 3


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        ("gated_dense_memory", {"DenseMemory.size": 4}, "DenseMemory.size = 4 must be above the"),
        ("gated_dense_memory", {"Window.cache": False}, "'tanh' needs Window.cache"),
        (
            "gated_dense_memory", {"DenseMemory.gate": "none", "Window.sinks": 2},
            "Window.sinks = 2 needs DenseMemory.gate = 'tanh'",
        ),
        (
            "gated_dense_memory", {"DenseMemory.gate": "none", "Window.block": 2},
            "layer 0 of DenseMemory.layers reads its block of 2 tokens instead of a window of 4",
        ),
        ("memorizing", {"Window.block": 8}, "window of 4 tokens must not be below the block of 8"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(
    kind: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        model_of(kind, **settings)


def test_the_layer_goes_through_in_bfloat16(random_params: Callable) -> None:
    model = dataclasses.replace(model_of("gated_dense_memory"), dtype="bfloat16")
    params = params_of(random_params, model)
    state = kinds.of("gated_dense_memory").new_state(model, LANES, jnp.dtype("bfloat16"))
    y, after = read(params, model, inputs().astype(jnp.bfloat16), state)
    exact, _ = read(params, model_of("gated_dense_memory"), inputs())
    assert y.dtype == after.keys.dtype == jnp.bfloat16
    assert np.mean(np.abs(np.asarray(y, np.float32) - exact)) < 0.05
