"""Tests that greedy and beam search write the texts that transformers 5.23.0 writes.

The models are the same, and record_generation.py recorded the texts.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import arrays

from brt.config import Decoding
from brt.generation.search import TextDecoder, search
from brt.models import seq2seq

SCORE = 1e-5  # relative tolerance of float32 scores, which have magnitudes from 0.1 to 20
RECORDED = arrays(Path(__file__).resolve().parents[2] / "data/huggingface/generation.npz")
CASES = json.loads(str(RECORDED["cases"]))


@pytest.mark.slow_cases("*-[134]", "t5-[02]", "bart-[05]", "t5_gated-[25]", "t5-5", "t5_gated-0")
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("model_name", ["t5", "t5_gated", "bart"])
def test_generated_texts_and_scores_equal_those_of_transformers(
    read: Callable, directory: Callable[[str], Path], model_name: str, number: int
) -> None:
    model, decoding = read(model_name)[0], Decoding(**CASES[number])
    network = seq2seq.Seq2Seq(model.described.model, model.described.cross)
    inputs = arrays(directory(model_name) / "expected.npz")
    source, mask = jnp.asarray(inputs["source"]), jnp.asarray(inputs["mask"], bool)

    @jax.jit
    def write(params: dict) -> tuple:
        encoded = seq2seq.encode(network, params, source, mask)
        state = seq2seq.prefill(network, params, encoded, mask, decoding.beams, decoding.max_length)
        step = functools.partial(seq2seq.step, network, params)
        decoder = TextDecoder(step, seq2seq.reorder, model.described.special)
        return search(decoder, state, batch=len(source), decoding=decoding)

    found = write(model.params)
    expected = RECORDED[f"{model_name}/{number}/sequences"].astype(np.int32)
    length, special = expected.shape[-1], model.described.special
    behind = np.arange(length) >= np.asarray(found.lengths)[..., None]
    assert np.isin(expected[behind], [special.pad, special.eos]).all(), "with pad 0, theirs is eos"
    expected[behind] = special.pad
    np.testing.assert_array_equal(found.sequences[..., :length], expected)
    assert (np.asarray(found.lengths) <= length).all()
    if decoding.beams > 1:
        scores = RECORDED[f"{model_name}/{number}/scores"]
        np.testing.assert_allclose(found.scores, scores, atol=SCORE, rtol=SCORE)
