"""Tests sliding windows whose length differs from the block, the tokens that are read at once.

`test_every_kind.py` tests that models with such windows read a text in segments of any length.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import LANES, assert_close, random_ids, starts

from brt.config import Model
from brt.models.decoder import Decoder, new_state
from brt.ops.dropout import Dropout
from brt.ops.window_attention import local_attention

TOLERANCE = 2e-5  # absolute, float32; hidden vectors and states have magnitude 1
TOKENS, VOCABULARY = 48, 16
PLAIN = Model(
    layers=3, model_dim=16, heads=2, head_dim=8, mlp_dim=16, vocab_size=VOCABULARY, window=8,
    relative_buckets=4, relative_max_distance=8, dtype="float32",
)  # fmt: skip


@pytest.mark.slow_cases("10-t5", "10-rotary", "10-none", "10-alibi")
@pytest.mark.parametrize("positions", ["t5", "rotary", "alibi", "none"])
@pytest.mark.parametrize("chunk", [10, pytest.param(TOKENS, marks=pytest.mark.slow)])
def test_a_window_of_one_block_is_the_same_whichever_way_it_is_read(
    positions: str, chunk: int, random_params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of half a window give the attention that blocks of a whole window give."""
    # 48 tokens are no multiple of 10.
    monkeypatch.setattr("brt.ops.window_attention.chunks.CHUNK", chunk)
    whole = dataclasses.replace(PLAIN, layers=1, positions=positions)
    halves = with_settings(whole, {"Window.block": 4})
    params, ids = random_params(whole), jnp.asarray(random_ids(0, VOCABULARY, TOKENS))

    def both(model: Model) -> tuple:
        def total(params: Any) -> tuple:
            start = jnp.asarray(starts(model, TOKENS, (1, 16)))
            output = Decoder(model).apply({"params": params}, ids, new_state(model, LANES), start)
            return jnp.sum(jnp.sin(output.hidden)), output.hidden

        return jax.jit(jax.value_and_grad(total, has_aux=True))(params)

    (_, expected), gradients = both(whole)
    (_, hidden), found = both(halves)
    assert_close(hidden, expected, TOLERANCE)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=2e-4), found, gradients)


def test_dropout_of_attention_is_drawn_for_every_chunk_and_leaves_the_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries of zeros give all visible keys the same weight. With values of ones, the output is
    the sum of the weights that were not dropped.
    """
    monkeypatch.setattr("brt.ops.window_attention.chunks.CHUNK", 16)
    zeros, ones = jnp.zeros((LANES, TOKENS, 2, 4)), jnp.ones((LANES, TOKENS, 2, 4))
    cached = jnp.ones((LANES, 8, 2, 4))
    part = local_attention(
        zeros, (cached, cached), ones, ones, None, jnp.full((LANES, 6), -8, jnp.int32),
        Dropout(jax.random.key(0), 0.5),
    )  # fmt: skip
    left = np.asarray(part.output[..., 0])
    assert abs(left.mean() - 1) < 0.1 and left.std() > 0.2
    assert np.abs(left[:, :16] - left[:, 16:32]).max() > 0.1
    np.testing.assert_allclose(part.lse, np.log(8), atol=1e-6)
