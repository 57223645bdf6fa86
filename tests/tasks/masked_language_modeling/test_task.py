"""The objective, and how it is evaluated."""

import dataclasses
import math
import random
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brt.evaluation.masked_job import MaskedReader
from brt.evaluation.masked_language_modeling import Evaluator
from brt.training.objectives import encoders
from brt.training.objectives import masked_language_modeling as objective

from brt.config import Attention, Config, Encoder, Evaluation, Training
from brt.data import token_store
from brt.data.documents import Document
from brt.data.token_store import TokenStore
from brt.data.tokenizers import ByteTokenizer
from brt.errors import ConfigError
from brt.models import encoder, seq2seq
from brt.training import objectives, reading
from brt.types import Batch

LENGTH = 20
CONFIG = Config(
    training=Training(
        objective="masked_language_modeling", segment_length=LENGTH, batch_size=3, loss_chunk=3
    ),
    encoder=Encoder(
        layers=1,
        model_dim=8,
        heads=2,
        mlp_dim=12,
        vocab_size=257,
        max_positions=LENGTH,
        dropout=0.0,
    ),
    attention=Attention(kind="improved_clustered", clusters=4, top_k=5),
    evaluation=Evaluation(batch_size=2),
)


@pytest.fixture(scope="module")
def params() -> Any:
    return nn.meta.unbox(jax.jit(lambda: encoders.initial_params(CONFIG, jax.random.key(0)))())


def batch() -> Batch:
    tokens = np.random.default_rng(0).integers(256, size=(3, LENGTH)).astype(np.int32)
    scored = np.arange(LENGTH)[None] < np.array([[LENGTH], [9], [0]])
    start = jnp.ones((3, 1), bool)
    return Batch(jnp.asarray(tokens), jnp.asarray(tokens), jnp.asarray(scored), start)


def test_the_loss_is_of_the_masked_tokens_alone(params: Any) -> None:
    """As from all logits; 3 + 1 tokens of 20 + 9 are masked, and all parameters learn.

    The third row is all padding.
    """
    key, of = jax.random.key(3), objectives.of(CONFIG)
    step = jax.jit(jax.value_and_grad(lambda *x: of.loss(*x, CONFIG), has_aux=True))
    (total, (nats, carried)), gradients = step(params, (), batch(), key)
    assert carried == () and int(of.scored(batch(), CONFIG)) == 4
    np.testing.assert_allclose(total, nats)
    leaves = jax.tree.leaves(gradients)
    assert all(np.any(leaf) and np.isfinite(leaf).all() for leaf in leaves)

    masks, attention = (jax.random.fold_in(key, purpose) for purpose in (0, 1))
    tokens = objective.masked(batch(), jax.random.split(masks, 3), CONFIG)
    network = encoders.network(CONFIG)
    vectors = jax.jit(network.apply)({"params": params}, tokens.inputs, batch().scored, attention)
    logits = np.asarray(seq2seq.logits(encoder.readout(params), vectors), np.float64)
    expected = 0.0
    for row, slot in zip(*np.nonzero(tokens.scored), strict=True):
        all_logits = logits[row, tokens.positions[row, slot]]
        expected += np.log(np.exp(all_logits).sum()) - all_logits[tokens.targets[row, slot]]
    np.testing.assert_allclose(total, expected, rtol=1e-5)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    draw = random.Random(0)
    documents = [
        Document(f"{i}.txt", iter(["".join(draw.choices("abc \n", k=length))]))
        for i, length in enumerate((1, 50, 20, 33))
    ]
    return token_store.write(tmp_path_factory.mktemp("texts") / "test", documents, ByteTokenizer())


def test_evaluation_does_not_depend_on_how_it_is_batched(params: Any, texts: TokenStore) -> None:
    alone, together = (
        Evaluator(dataclasses.replace(CONFIG, evaluation=Evaluation(batch_size=size)))
        for size in (1, 3)
    )
    one, three = alone(params, texts), together(params, texts)
    np.testing.assert_allclose(one.bits, three.bits, rtol=1e-5)
    np.testing.assert_array_equal(one.masked, three.masked)
    assert one.right == three.right
    figures = one.figures
    assert figures["masked_tokens"] == one.masked.sum() > 8
    assert abs(figures["bits_per_masked_token"] - math.log2(257)) < 1
    begun = alone(params, texts, tokens_per_document=LENGTH)
    assert 0 < begun.masked.sum() < one.masked.sum()
    assert alone(params, texts, stop=lambda: True) is None


def test_an_encoder_has_no_memory_to_take_away() -> None:
    with pytest.raises(ConfigError, match="--ablate=state is for language models"):
        MaskedReader(CONFIG, "test", "state")


def test_keys_that_nothing_reads_are_not_trained() -> None:
    config = dataclasses.replace(CONFIG, attention=Attention(kind="reformer"))
    with pytest.raises(ConfigError, match="'reformer' takes the queries for keys, whose projec"):
        reading.prepare(config)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"encoder": Encoder(features=3)}, "Encoder.features = 3 must be 0 where"),
        (
            {"encoder": Encoder(max_positions=19)},
            "Training.segment_length = 20 is above Encoder.max_positions = 19",
        ),
        (
            {"evaluation": Evaluation(segment_length=21)},
            "Evaluation.segment_length = 21 is above Encoder.max_positions = 20",
        ),
    ],
)
def test_settings_that_clash_are_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        dataclasses.replace(CONFIG, **changes)


def test_the_mask_needs_an_id() -> None:
    small = dataclasses.replace(CONFIG.encoder, vocab_size=256)
    with pytest.raises(ConfigError, match="bytes with 257 ids, the mask included; set it to 0"):
        reading.written_out(dataclasses.replace(CONFIG, encoder=small), ByteTokenizer())
    free = dataclasses.replace(CONFIG.encoder, vocab_size=0)
    written = reading.written_out(dataclasses.replace(CONFIG, encoder=free), ByteTokenizer())
    assert written.encoder.vocab_size == 257
