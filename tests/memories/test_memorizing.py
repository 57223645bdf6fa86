import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Mesh, Model
from brt.distributed.mesh import build
from brt.layers.kinds import KINDS, replace_parts
from brt.memories import Memorizing
from brt.memories.memorizing import MemorizingLayer, new_memory_state
from brt.memories.past_tokens import MemoryState, tokens_before
from brt.ops.normalization import l2_normalize

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
    kinds=(Memorizing(layers=(0,), size=32, neighbors=3),),
)
NOWHERE = np.zeros((LANES, BLOCKS), bool)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    found = random_params(MODEL)["stack"]["memorizing_0"]
    return jax.tree.map(lambda leaf: leaf[0], found)


def new_state(model: Model = MODEL) -> MemoryState:
    return new_memory_state(model, LANES, jnp.dtype("float32"))


def inputs(seed: int = 0) -> jax.Array:
    shape = (LANES, TOKENS, MODEL.model_dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def compiled(model: Model) -> Callable:
    return jax.jit(MemorizingLayer(model).apply)


def read(
    params: Any, x: jax.Array, state: MemoryState, start: np.ndarray = NOWHERE,
    model: Model = MODEL,
) -> tuple[jax.Array, MemoryState]:  # fmt: skip
    """Returns the output and the next state of the layer for a segment."""
    start = jnp.asarray(start)
    output = compiled(model)({"params": params}, x, state=state, document_start=start)
    return output[:2]


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE), actual, expected)


def test_a_gate_per_head_begins_half_open_and_there_are_no_positions() -> None:
    model = dataclasses.replace(MODEL, positions="t5")
    init, start = jax.jit(MemorizingLayer(model).init), jnp.asarray(NOWHERE)
    tree = init(jax.random.key(0), inputs(), state=new_state(), document_start=start)["params"]
    np.testing.assert_array_equal(tree["memory_gate"].value, [0, 0])
    assert "relative_bias" not in tree["tokens"]


def test_blocks_find_the_tokens_of_their_document_that_fit() -> None:
    start = jnp.array([[False, False, False], [True, False, False], [False, True, False]])
    counts = tokens_before(jnp.array([2, 5, 9]), start, window=4, size=9)
    np.testing.assert_array_equal(counts, [[2, 6, 9, 9], [0, 4, 8, 9], [9, 0, 4, 8]])


def test_the_memory_holds_the_last_tokens_of_the_document_and_nothing_else(params: Any) -> None:
    start = np.zeros((LANES, BLOCKS), bool)
    start[1, 2] = True
    _, before = read(params, inputs(1), new_state())
    _, after = read(params, inputs(), before, start)
    assert after.length.tolist() == [2 * TOKENS, TOKENS // 2]
    window = l2_normalize(after.window.keys).swapaxes(1, 2)
    np.testing.assert_allclose(after.keys[:, :, -WINDOW:], window, atol=TOLERANCE)
    np.testing.assert_array_equal(after.keys[0, :, :TOKENS], before.keys[0, :, TOKENS:])
    assert np.all(np.any(after.keys[1, :, TOKENS + 2 * WINDOW :], axis=-1))
    assert not np.any(after.keys[1, :, : TOKENS + 2 * WINDOW])
    assert not np.any(after.values[1, :, : TOKENS + 2 * WINDOW])


def test_a_token_finds_earlier_blocks_but_neither_its_own_nor_the_future(params: Any) -> None:
    """A token finds tokens beyond the window, back to the start of its document. In lane 1, a
    document starts at block 2.
    """
    start = np.zeros((LANES, BLOCKS), bool)
    start[1, 2] = True
    model = with_settings(
        MODEL, {"Window.cache": False, "Memorizing.neighbors": TOKENS}
    )  # The search finds all tokens.

    def output(x: jax.Array) -> np.ndarray:
        return np.asarray(read(params, x, new_state(), start, model)[0])

    base = output(inputs())
    changed = [np.abs(output(inputs().at[:, t].add(1.0)) - base).max(-1) > 0 for t in range(TOKENS)]
    depends = np.stack(changed, axis=2)  # [lane, reading token, token that is read]
    block = np.arange(TOKENS) // WINDOW
    place = np.arange(TOKENS)
    expected = (block[:, None] > block[None]) | (
        (block[:, None] == block[None]) & (place[:, None] >= place[None])
    )
    np.testing.assert_array_equal(depends[0], expected)
    same_document = (block[:, None] >= 2) == (block[None] >= 2)
    np.testing.assert_array_equal(depends[1], expected & same_document)


def test_no_gradient_reaches_earlier_blocks_through_the_memory_but_the_gate_gets_one(
    params: Any,
) -> None:
    model = with_settings(MODEL, {"Window.cache": False})

    def last_block(params: Any, x: jax.Array) -> jax.Array:
        y, _ = read(params, x, new_state(), model=model)
        return jnp.sum(y[:, -WINDOW:] ** 2)

    of_params, of_x = jax.grad(last_block, argnums=(0, 1))(params, inputs())
    assert not np.any(of_x[:, :-WINDOW]) and np.all(np.any(of_x[:, -WINDOW:], axis=-1))
    assert np.all(of_params["memory_gate"])


@pytest.mark.parametrize("masked", [True, False])
def test_an_empty_memory_is_masked_or_counts_as_zeros(params: Any, masked: bool) -> None:
    """In the original code, an empty memory counts as keys and values of zeros."""
    model = with_settings(MODEL, {"Window.mask_empty_cache": masked})

    def first_block(gate: float) -> np.ndarray:
        changed = {**params, "memory_gate": jnp.full((MODEL.heads,), gate)}
        return np.asarray(read(changed, inputs(), new_state(), model=model)[0][:, :WINDOW])

    shut, half, wide = (first_block(gate) for gate in (-100.0, 0.0, 100.0))
    if masked:
        np.testing.assert_array_equal(half, shut)
        np.testing.assert_array_equal(wide, shut)
        return
    assert np.abs(half - shut).max() > 0.01
    silent = {**params["tokens"], "values": 0 * params["tokens"]["values"]}
    y, _ = read({**params, "tokens": silent}, inputs(), new_state(), model=model)
    np.testing.assert_allclose(wide, y[:, :WINDOW], atol=TOLERANCE)


def test_a_memory_of_any_size_keeps_what_fits(params: Any) -> None:
    """A larger memory gives the same results while nothing is forgotten. A smaller one does not."""
    results = []
    for size in (TOKENS - WINDOW, TOKENS, 100):
        model = with_settings(MODEL, {"Memorizing.size": size, "DenseMemory.size": size})
        y, state = read(params, inputs(), new_state(model), model=model)
        again, _ = read(params, inputs(2), state, model=model)
        results.append((y, again[:, :WINDOW]))
    assert_close(results[1], results[2])
    # The smallest memory is large enough for the first segment.
    assert_close(results[0][0], results[2][0])
    assert np.abs(results[0][1] - results[2][1]).max() > 0.01


def test_the_memory_is_a_part_of_the_state_by_itself(params: Any) -> None:
    _, one = read(params, inputs(1), new_state())
    _, other = read(params, inputs(2), new_state())
    kind = KINDS["memorizing"]
    assert set(kind.parts) == {"cache", "memory"}
    forgetful = replace_parts(kind, one, new_state(), ["memory", "state"])
    assert forgetful.window.valid.all() and not forgetful.length.any()
    without = replace_parts(kind, one, new_state(), ["cache"])
    assert not without.window.valid.any() and without.length.tolist() == [TOKENS, TOKENS]
    grafted = replace_parts(kind, one, other, ["memory"])
    np.testing.assert_array_equal(grafted.values, other.values)
    np.testing.assert_array_equal(grafted.window.values, one.window.values)
    y, _ = read(params, inputs(), one)
    for changed in (forgetful, grafted):
        assert np.abs(read(params, inputs(), changed)[0] - y).max() > 0.01


def test_bfloat16_goes_through(params: Any) -> None:
    state = new_memory_state(MODEL, LANES, jnp.dtype("bfloat16"))
    y, after = read(params, inputs().astype(jnp.bfloat16), state)
    exact, _ = read(params, inputs(), new_state())
    assert y.dtype == after.keys.dtype == after.values.dtype == jnp.bfloat16
    assert np.mean(np.abs(np.asarray(y, np.float32) - exact)) < 0.05


@pytest.mark.slow  # tests/sharded/test_equality.py compares whole runs on several devices.
def test_lanes_on_many_devices_stay_where_they_are(params: Any) -> None:
    mesh = build(Mesh(data=2), {})
    by_lane = jax.NamedSharding(mesh, jax.P("data"))
    arguments = inputs(), read(params, inputs(1), new_state())[1], jnp.asarray(NOWHERE)
    placed = jax.device_put(arguments, by_lane)

    @jax.jit
    def value_and_grad(params: Any, x: Any, state: Any, start: Any) -> tuple:
        def total(params: Any) -> tuple:
            y, after, *_ = MemorizingLayer(MODEL).apply(
                {"params": params}, x, state=state, document_start=start
            )
            return jnp.sum(y**2), (y, after)

        return jax.grad(total, has_aux=True)(params)

    expected = value_and_grad(params, *arguments)
    with jax.set_mesh(mesh):
        assert_close(value_and_grad(params, *placed), expected)
        text = value_and_grad.lower(params, *placed).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text and "all-to-all" not in text
