import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import (
    BLOCKS,
    LANES,
    NOWHERE,
    TOKENS,
    TOLERANCE,
    WINDOW,
    assert_close,
    inputs,
    layer_params,
    new_state,
    one_layer,
    read,
)

from brt.config import Model
from brt.layers.state import Given
from brt.memories import Compressive
from brt.memories.compressive import CompressiveLayer, Convolution, compress

MADE = 2  # The number of slots of a block.
MODEL = one_layer(Compressive(layers=(0,), slots=5, rate=WINDOW // MADE))


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return layer_params(random_params, MODEL)


def test_neighbours_become_one_by_hand() -> None:
    x = np.random.default_rng(0).normal(size=(3, 6, 2)).astype(np.float32)
    kernel, bias = np.random.default_rng(1).normal(size=(3, 2, 2)), np.array([1.0, -2.0])
    learned = Convolution(jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32))
    slots = [bias + sum(x[:, 3 * j + i] @ kernel[i] for i in range(3)) for j in range(2)]
    found = compress(jnp.asarray(x), 3, learned)
    np.testing.assert_allclose(found, np.stack(slots, axis=1), rtol=1e-5)


def test_slots_are_made_of_blocks_two_back_oldest_first_and_leave(params: Any) -> None:
    state, length, x = new_state(MODEL), 0, np.asarray(inputs())
    section = MODEL.of(Compressive)
    learned = Convolution(params["compressor_kernel"], params["compressor_bias"])
    made_of = jax.jit(lambda x: compress(x, section.rate, learned))
    for n in range(BLOCKS):
        before, block = state, x[:, n * WINDOW : (n + 1) * WINDOW]
        state = jax.tree.map(np.asarray, read(MODEL, params, block, state).state)
        np.testing.assert_array_equal(state.inputs, block)
        length = min(length + MADE * (n > 0), section.slots)
        assert state.length.tolist() == [length] * LANES
        if n > 0:
            made = made_of(before.inputs)
            np.testing.assert_allclose(state.vectors[:, -MADE:], made, atol=TOLERANCE)
            np.testing.assert_array_equal(state.vectors[:, :-MADE], before.vectors[:, MADE:])
        assert not np.any(state.vectors[:, : section.slots - length])
    assert length == section.slots < MADE * (BLOCKS - 1), "the oldest is gone"


@pytest.mark.slow  # The quick tests of slots show what they are made of, and that they are read.
def test_older_blocks_are_read_through_the_compressor_alone(params: Any) -> None:
    """If the compressor's kernel is zero, changes of block 1 have no effect on block 3."""
    start = NOWHERE.copy()
    start[1, 2] = True
    model = with_settings(MODEL, {"Compressive.slots": MADE})
    silent = {**params, "compressor_kernel": jnp.zeros_like(params["compressor_kernel"])}
    deaf, other = (
        read(model, silent, x, start=start).x for x in (inputs(), inputs().at[:, WINDOW].add(1.0))
    )
    np.testing.assert_array_equal(deaf[:, 3 * WINDOW :], other[:, 3 * WINDOW :])
    assert np.any(deaf[0, 2 * WINDOW : 3 * WINDOW] != other[0, 2 * WINDOW : 3 * WINDOW])


def test_slots_that_are_tokens_are_a_window_of_all_that_was_read(random_params: Callable) -> None:
    """A compressor that is the identity with the rate 1 makes a slot of each token. Without
    positions, the layer then equals a long window. It reads 2W + C tokens back, where W is the
    window and C the number of slots.
    """
    model = with_settings(
        MODEL, {"positions": "none", "Compressive.rate": 1, "Compressive.slots": TOKENS}
    )
    params = layer_params(random_params, model)
    identity = {"compressor_kernel": jnp.eye(16)[None], "compressor_bias": jnp.zeros(16)}
    wide = dataclasses.replace(model, window=TOKENS)
    assert_close(read(model, params | identity, inputs()).x, read(wide, params, inputs()).x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(model: Model, own: bool, params: Any, x: jax.Array, state: Any) -> Any:
    """Returns the task's loss or the compressor's loss, and its gradients."""

    def loss(params: Any, x: jax.Array, vectors: jax.Array) -> jax.Array:
        y, _, aux, _ = CompressiveLayer(model).apply(
            {"params": params}, x,
            Given(state._replace(vectors=vectors), document_start=jnp.asarray(NOWHERE)),
        )  # fmt: skip
        return aux.losses["compression"] if own else jnp.sum(y**2)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(params, x, state.vectors)


@pytest.mark.slow
def test_the_task_trains_all_but_the_compressor_whose_loss_trains_nothing_else(params: Any) -> None:
    state = read(MODEL, params, inputs(1)).state
    compressor = {"compressor_kernel", "compressor_bias"}
    assert params.keys() == {"tokens", *compressor}
    _, (of_task, of_x, of_slots) = gradients(MODEL, False, params, inputs(), state)
    assert not any(np.any(of_task[name]) for name in compressor) and not np.any(of_slots)
    assert all(map(np.any, jax.tree.leaves(of_task["tokens"]))) and np.any(of_x)
    _, (of_own, of_x, of_slots) = gradients(MODEL, True, params, inputs(), state)
    assert all(np.any(of_own[name]) for name in compressor)
    assert not any(map(np.any, jax.tree.leaves((of_own["tokens"], of_x, of_slots))))


def test_weights_learn_from_the_slots_they_read(params: Any) -> None:
    """All tokens are zeros, and so are their slots without the compressor's bias. The values'
    weights then learn only from the slots in the state.
    """
    params = {**params, "compressor_bias": jnp.zeros(16)}
    state, x = read(MODEL, params, inputs(1)).state, jnp.zeros_like(inputs())
    learnt, not_learnt = (
        gradients(MODEL, False, params, x, s)[1][0]["tokens"]["values"]
        for s in (state, new_state(MODEL))
    )
    assert np.any(learnt) and not np.any(not_learnt)


@pytest.mark.slow
def test_the_loss_is_of_tokens_that_have_a_block_before_theirs(params: Any) -> None:
    def loss(start: np.ndarray) -> float:
        return float(read(MODEL, params, inputs(), start=start).aux.losses["compression"])

    assert loss(np.ones_like(NOWHERE)) == 0 < loss(NOWHERE)


def test_slots_cannot_be_read_if_the_block_after_them_is_missing(params: Any) -> None:
    past = read(MODEL, params, inputs(1)).state
    new = new_state(MODEL)
    without = past._replace(window=new.window, inputs=new.inputs)
    found, fresh = (read(MODEL, params, inputs(), state).x for state in (without, None))
    np.testing.assert_array_equal(found, fresh)
