import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import BLOCKS, LANES, WINDOW, inputs, layer_params, new_state, one_layer
from one_layer import read as one_layer_read

from brt.config import Model
from brt.layers.state import Given, LayerOutput
from brt.memories import Summaries
from brt.memories.summary import LongSummaryLayer

SECTION = Summaries(long_layers=(0,), summaries=2, short_memory=3, long_memory=6, long_increment=2)
MODEL = one_layer(SECTION)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return layer_params(random_params, MODEL)


def summaries(seed: int = 0) -> jax.Array:
    shape = (LANES, BLOCKS, SECTION.summaries, MODEL.model_dim)
    return jnp.asarray(np.random.default_rng(seed + 10).normal(size=shape), jnp.float32)


def read(
    params: Any, seed: int = 0, state: Any = None, model: Model = MODEL, **given: Any
) -> LayerOutput:
    """Reads a random segment, of which `given` may replace the tokens x and the summaries."""
    x, below = given.pop("x", inputs(seed)), given.pop("summaries", summaries(seed))
    return one_layer_read(model, params, x, state, summaries=below, **given)


def differs(one: jax.Array, other: jax.Array) -> np.ndarray:
    """Returns a boolean array that is True where vectors of two arrays differ."""
    return np.any(np.asarray(one != other), axis=-1)


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("itself", [True, False])
def test_tokens_read_no_summary_of_their_block_and_summaries_all_its_tokens(
    params: Any, itself: bool
) -> None:
    model = with_settings(MODEL, {"Window.attend_to_self": itself})
    base = read(params, model=model)
    for place in range(SECTION.summaries):
        after = read(params, model=model, summaries=summaries().at[0, 1, place].add(1.0))
        tokens, made = differs(after.x, base.x), differs(after.summaries, base.summaries)
        assert not tokens[0, : 2 * WINDOW].any() and tokens[0, 2 * WINDOW :].all()
        # Summaries mix all summaries of their block.
        assert not made[0, :1].any() and made[0, 1:].all()
        assert not (tokens[1].any() or made[1].any())
    after = read(params, model=model, x=inputs().at[0, WINDOW].add(1.0))
    assert differs(after.x, base.x)[0, WINDOW:].all()
    assert differs(after.summaries, base.summaries)[0, 1:].all()


def test_a_block_finds_what_earlier_blocks_left_until_newer_ones_push_it_out(params: Any) -> None:
    full = read(params, 1).state
    assert full.length.tolist() == [SECTION.long_memory] * LANES
    # Without the mixes, a vector of the memory has no effect on the vectors that blocks add, and
    # acts only while it is in the memory.
    mixes = {name: params[name] for name in ("short_mix", "long_mix")}
    silent = params | jax.tree.map(jnp.zeros_like, mixes)
    base = read(silent, state=full)
    for slot in range(SECTION.long_memory):
        changed = full._replace(vectors=full.vectors.at[0, slot].add(1.0))
        found = differs(read(silent, state=changed).x, base.x)[0].reshape(BLOCKS, WINDOW)
        there = np.arange(BLOCKS) <= slot // SECTION.long_increment  # Slot 0 is the oldest.
        np.testing.assert_array_equal(found, np.repeat(there[:, None], WINDOW, axis=1))


def test_dropout_is_anothers_in_every_block(params: Any) -> None:
    model = dataclasses.replace(MODEL, dropout=0.5)
    x, below = jnp.ones_like(inputs()), jnp.ones_like(summaries())
    # Every block starts a document, so that blocks differ only in their dropout.
    start = jnp.ones((LANES, BLOCKS), bool)

    @jax.jit
    def drawn(seed: int) -> jax.Array:
        layer, rngs = LongSummaryLayer(model, training=True), {"dropout": jax.random.key(seed)}
        y = layer.apply(
            {"params": params}, x,
            Given(new_state(MODEL), document_start=start, summaries=below), rngs=rngs,
        )  # fmt: skip
        return y.x.reshape(LANES * BLOCKS, -1)

    y = drawn(0)
    np.testing.assert_array_equal(y, drawn(0))
    assert len({np.asarray(block).tobytes() for block in y}) == LANES * BLOCKS
