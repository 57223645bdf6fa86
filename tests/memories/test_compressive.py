import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from model_settings import with_settings

from brt.config import Model
from brt.errors import ConfigError
from brt.layers.kinds import KINDS, replace_parts
from brt.memories import Compressive
from brt.memories.compressive import (
    CompressedState,
    CompressiveLayer,
    Convolution,
    compress,
    new_compressed_state,
    visible_slot_counts,
)
from brt.models.flops import forward_flops_per_token

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS, SLOTS = 2, 4, 4, 2  # SLOTS is the number of slots of a block.
TOKENS = WINDOW * BLOCKS
MODEL = Model(
    layers=1,
    model_dim=16,
    heads=2,
    head_dim=8,
    mlp_dim=32,
    window=WINDOW,
    vocab_size=8,
    kinds=(Compressive(layers=(0,), slots=5, rate=WINDOW // SLOTS),),
)
NOWHERE = np.zeros((LANES, BLOCKS), bool)
START = jnp.asarray(NOWHERE)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return layer_params(random_params, MODEL)


def layer_params(random_params: Callable, model: Model) -> Any:
    return jax.tree.map(lambda x: x[0], random_params(model)["stack"]["compressive_0"])


def new_state(model: Model = MODEL) -> CompressedState:
    return new_compressed_state(model, LANES, jnp.dtype("float32"))


def inputs(seed: int = 0) -> jax.Array:
    shape = (LANES, TOKENS, MODEL.model_dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def compiled(model: Model) -> Callable:
    return jax.jit(CompressiveLayer(model).apply)


def read(
    params: Any, x: jax.Array, state: CompressedState, start: np.ndarray = NOWHERE,
    model: Model = MODEL,
) -> tuple:  # fmt: skip
    """Returns the output, the next state and the auxiliary results of the layer for a segment."""
    start = jnp.asarray(start)
    output = compiled(model)({"params": params}, x, state=state, document_start=start)
    return output[:3]


def test_neighbours_become_one_by_hand() -> None:
    x = np.random.default_rng(0).normal(size=(3, 6, 2)).astype(np.float32)
    for kind, by_hand in (("mean", np.mean), ("max", np.max)):
        slots = [by_hand(x[:, i : i + 3], axis=1) for i in (0, 3)]
        found = compress(jnp.asarray(x), 3, kind)
        np.testing.assert_allclose(found, np.stack(slots, axis=1), atol=1e-6)
    kernel, bias = np.random.default_rng(1).normal(size=(3, 2, 2)), np.array([1.0, -2.0])
    learned = Convolution(jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32))
    slots = [bias + sum(x[:, 3 * j + i] @ kernel[i] for i in range(3)) for j in range(2)]
    found = compress(jnp.asarray(x), 3, learned)
    np.testing.assert_allclose(found, np.stack(slots, axis=1), rtol=1e-5)


def test_blocks_find_the_slots_of_their_document_that_fit() -> None:
    cache_mask = jnp.array([[True, True, True], [False, True, True], [True, False, True]])
    found = visible_slot_counts(jnp.array([3, 5, 6]), cache_mask, added=2, size=6)
    np.testing.assert_array_equal(found, [[3, 5, 6, 6], [0, 0, 2, 4], [6, 0, 0, 2]])


def test_slots_are_made_of_blocks_two_back_oldest_first_and_leave(params: Any) -> None:
    state, length, x = new_state(), 0, np.asarray(inputs())
    learned = Convolution(params["compressor_kernel"], params["compressor_bias"])
    made_of = jax.jit(lambda x: compress(x, MODEL.of(Compressive).rate, learned))
    for n in range(BLOCKS):
        before, block = state, x[:, n * WINDOW : (n + 1) * WINDOW]
        state = jax.tree.map(np.asarray, read(params, block, state, NOWHERE[:, :1])[1])
        np.testing.assert_array_equal(state.inputs, block)
        length = min(length + SLOTS * (n > 0), MODEL.of(Compressive).slots)
        assert state.length.tolist() == [length] * LANES
        if n > 0:
            made = made_of(before.inputs)
            np.testing.assert_allclose(state.vectors[:, -SLOTS:], made, atol=TOLERANCE)
            np.testing.assert_array_equal(state.vectors[:, :-SLOTS], before.vectors[:, SLOTS:])
        assert not np.any(state.vectors[:, : MODEL.of(Compressive).slots - length])
    assert length == MODEL.of(Compressive).slots < SLOTS * (BLOCKS - 1), "the oldest is gone"


def test_a_token_reads_its_block_the_one_before_and_slots_of_older_ones(params: Any) -> None:
    """A block is read as slots two blocks later, not in the next block. In lane 1, a document
    starts at block 2.
    """
    start = NOWHERE.copy()
    start[1, 2] = True
    model = with_settings(MODEL, {"Compressive.slots": SLOTS})

    def output(x: jax.Array) -> np.ndarray:
        return np.asarray(read(params, x, new_state(model), start, model)[0])

    base = output(inputs())
    changed = [np.any(output(inputs().at[:, t].add(1.0)) != base, -1) for t in range(TOKENS)]
    depends = np.stack(changed, axis=2)  # [lane, reading token, token that is read]
    place = np.arange(TOKENS)
    back = place[:, None] // WINDOW - place[None] // WINDOW  # distance in blocks
    expected = ((back == 0) & (place[:, None] >= place[None])) | (back == 1) | (back == 2)
    np.testing.assert_array_equal(depends[0], expected)
    document = place // WINDOW >= 2
    np.testing.assert_array_equal(depends[1], expected & (document[:, None] == document[None]))
    # Block 3 sees block 1 only through the compressor. If the compressor's kernel is zero, changes
    # of block 1 have no effect on block 3.
    silent = {**params, "compressor_kernel": jnp.zeros_like(params["compressor_kernel"])}
    deaf, other = (
        read(silent, x, new_state(model), start, model)[0]
        for x in (inputs(), inputs().at[:, WINDOW].add(1.0))
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
    y, _, _ = read(params | identity, inputs(), new_state(model), model=model)
    wide = dataclasses.replace(model, window=TOKENS)
    expected, _, _ = read(params, inputs(), new_state(wide), NOWHERE[:, :1], wide)
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def gradients(params: Any) -> Callable:
    """Returns a function that computes gradients of the task's loss or of the compressor's loss."""

    @functools.partial(jax.jit, static_argnums=0)
    def of(own: bool, params: Any, x: jax.Array, state: CompressedState) -> Any:
        def loss(params: Any, x: jax.Array, vectors: jax.Array) -> jax.Array:
            given = state._replace(vectors=vectors)
            y, _, aux, _ = CompressiveLayer(MODEL).apply(
                {"params": params}, x, state=given, document_start=START
            )
            return aux.losses["compression"] if own else jnp.sum(y**2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(params, x, state.vectors)

    return of


def test_the_task_trains_all_but_the_compressor_whose_loss_trains_nothing_else(
    params: Any, gradients: Callable
) -> None:
    state = read(params, inputs(1), new_state())[1]
    _, (of_task, of_x, of_slots) = gradients(False, params, inputs(), state)
    compressor = {"compressor_kernel", "compressor_bias"}
    assert not any(np.any(of_task[name]) for name in compressor) and not np.any(of_slots)
    assert all(map(np.any, jax.tree.leaves(of_task["tokens"]))) and np.any(of_x)
    _, (of_own, of_x, of_slots) = gradients(True, params, inputs(), state)
    assert all(np.any(of_own[name]) for name in compressor)
    assert not any(map(np.any, jax.tree.leaves((of_own["tokens"], of_x, of_slots))))


@pytest.mark.slow
def test_slots_that_are_to_give_back_their_block_teach_the_compressor_alone(
    random_params: Callable,
) -> None:
    model = with_settings(MODEL, {"Compressive.loss": "autoencoding"})
    params, state = layer_params(random_params, model), new_state(model)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(own: bool, params: Any, x: jax.Array) -> tuple:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            y, _, aux, _ = CompressiveLayer(model).apply(
                {"params": params}, x, state=state, document_start=START
            )
            return aux.losses["compression"] if own else jnp.sum(y**2)

        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    learned = {f"{name}_{part}" for name in ("compressor", "decompressor")
               for part in ("kernel", "bias")}  # fmt: skip
    assert params.keys() == {"tokens", *learned}
    value, (of_own, of_x) = gradients(True, params, inputs())
    assert all(np.any(of_own[name]) for name in learned)
    assert not any(map(np.any, jax.tree.leaves((of_own["tokens"], of_x))))
    _, (of_task, _) = gradients(False, params, inputs())
    assert not any(np.any(of_task[name]) for name in learned)
    x = np.asarray(inputs()).reshape(LANES, BLOCKS, SLOTS, -1, MODEL.model_dim)[:, :-1]
    kernel, bias = (np.asarray(params[f"compressor_{part}"]) for part in ("kernel", "bias"))
    slots = np.einsum("bnsrd,rde->bnse", x, kernel) + bias
    kernel, bias = (np.asarray(params[f"decompressor_{part}"]) for part in ("kernel", "bias"))
    errors = np.einsum("bnse,erd->bnsrd", slots, kernel) + bias - x
    expected = np.mean(errors**2) * (BLOCKS - 1) / BLOCKS  # The first block has no block before it.
    assert float(value) == pytest.approx(expected, rel=1e-4)


def test_weights_learn_from_the_slots_they_read(params: Any, gradients: Callable) -> None:
    """All tokens are zeros, and so are their slots without the compressor's bias. The values'
    weights then learn only from the slots in the state.
    """
    params = {**params, "compressor_bias": jnp.zeros(16)}
    state, x = read(params, inputs(1), new_state())[1], jnp.zeros_like(inputs())
    learnt, not_learnt = (
        gradients(False, params, x, s)[1][0]["tokens"]["values"] for s in (state, new_state())
    )
    assert np.any(learnt) and not np.any(not_learnt)


@pytest.mark.slow
def test_the_compressor_learns_what_attention_reads_and_weights_stay_trainable(
    params: Any, gradients: Callable
) -> None:
    optimizer, state = optax.adam(0.01), read(params, inputs(1), new_state())[1]
    moments, losses = optimizer.init(params), []
    for _ in range(30):
        loss, (of_own, *_) = gradients(True, params, inputs(), state)
        updates, moments = jax.jit(optimizer.update)(of_own, moments)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    _, (of_task, *_) = gradients(False, params, inputs(), state)
    assert np.any(of_task["tokens"]["keys"]) and np.any(of_task["tokens"]["values"])


@pytest.mark.slow
def test_the_loss_is_of_tokens_that_have_a_block_before_theirs(params: Any) -> None:
    alone = np.ones_like(NOWHERE)
    assert float(read(params, inputs(), new_state(), alone)[2].losses["compression"]) == 0
    half = with_settings(MODEL, {"Compressive.loss_weight": 0.5})
    one, other = (read(params, inputs(), new_state(), model=m)[2].losses for m in (MODEL, half))
    assert float(one["compression"]) == pytest.approx(2 * float(other["compression"])) and one
    for changes in ({"Compressive.loss_weight": 0.0}, {"Compressive.compressor": "mean"}):
        model = with_settings(MODEL, changes)
        own = params if "compression" not in changes else {"tokens": params["tokens"]}
        assert read(own, inputs(), new_state(), model=model)[2].losses == {}


def test_slots_are_a_part_of_the_state_by_themselves(params: Any) -> None:
    one, other = (read(params, inputs(seed), new_state())[1] for seed in (1, 2))
    kind = KINDS["compressive"]
    assert set(kind.parts) == {"cache", "memory"}
    grafted = replace_parts(kind, one, other, ["memory"])
    np.testing.assert_array_equal(grafted.window.keys, one.window.keys)
    y = read(params, inputs(), one)[0]
    for changed in (grafted, replace_parts(kind, one, new_state(), ["memory"])):
        assert np.abs(read(params, inputs(), changed)[0] - y).max() > 1e-3
    # Slots cannot be read if the block after them is missing.
    without = replace_parts(kind, one, new_state(), ["cache"])
    fresh = read(params, inputs(), new_state())[0]
    np.testing.assert_array_equal(read(params, inputs(), without)[0], fresh)


def test_the_flops_of_compressive_layers_are_counted() -> None:
    def of(*kinds: Compressive) -> int:
        return forward_flops_per_token(Model(vocab_size=32000, kinds=kinds))

    found = of(Compressive(layers=(5,))) - of()
    # The slots, and the keys of the previous block that have left the window on average.
    beyond = 4 * 1024 * (512 + 256)
    # Projections of slots to keys and values, and the compressor.
    assert found == beyond + 4 * 1024 * 1024 + 2 * 1024 * 1024
    assert found - 2 * 1024**2 == of(Compressive(layers=(5,), compressor="max")) - of()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary"}, r"'rotary' has no positions for the slots .* use 't5', 'alibi'"),
        ({"Window.cache": False}, "which needs Window.cache = True"),
        (
            {"Compressive.rate": 3},
            "Model.window = 4 must be a multiple of Compressive.rate = 3",
        ),
        ({"Compressive.slots": 0}, "Compressive.slots = 0 must be above 0"),
        ({"Compressive.loss_weight": -1.0}, "Compressive.loss_weight = -1.0 must not be negative"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(MODEL, changes)
