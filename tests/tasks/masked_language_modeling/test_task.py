"""Tests the loss and the evaluation of masked language modeling."""

import dataclasses
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt import tasks
from brt.config import Attention, Config, Encoder, Evaluation, Training
from brt.data.preparation import Dataset
from brt.errors import ConfigError
from brt.models import encoder, seq2seq
from brt.tasks.arguments import Control, EvaluationRequest, LossInputs
from brt.tasks.masked_language_modeling.task import mask_batch, token_entropy
from brt.types import Batch, Variables

LENGTH = 20
CONFIG = Config(
    training=Training(
        task="masked_language_modeling", segment_length=LENGTH, batch_size=3, loss_chunk=3
    ),
    encoder=Encoder(
        layers=1, model_dim=8, heads=2, mlp_dim=12, vocab_size=257, max_positions=LENGTH,
        dropout=0.0,
    ),
    attention=Attention(kind="clustered", clusters=4), evaluation=Evaluation(batch_size=2),
)  # fmt: skip
TASK = tasks.from_config(CONFIG)
each_kind = pytest.mark.parametrize(
    "kind", ["full", pytest.param("clustered", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def params(drawn: Callable) -> Any:
    return drawn(CONFIG)


def batch() -> Batch:
    """Returns three rows with 20, 9 and 0 tokens."""
    tokens = np.random.default_rng(0).integers(256, size=(3, LENGTH)).astype(np.int32)
    scored = np.arange(LENGTH)[None] < np.array([[LENGTH], [9], [0]])
    start = jnp.ones((3, 1), bool)
    return Batch(jnp.asarray(tokens), jnp.asarray(tokens), jnp.asarray(scored), start)


@pytest.mark.slow
@each_kind
def test_the_loss_is_of_the_masked_tokens_alone(kind: str, params: Any) -> None:
    """The loss equals one computed from all logits. Of 20 + 9 tokens, 3 + 1 are masked.

    The third row is all padding.
    """
    key = jax.random.key(3)
    config = dataclasses.replace(CONFIG, attention=Attention(kind=kind, clusters=4))
    loss = partial(TASK.loss, config)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, aux), gradients = step(params, LossInputs(batch(), key))
    assert aux.carry == aux.model_state == () and int(aux.count) == 4
    np.testing.assert_allclose(total, aux.nats)
    leaves = jax.tree.leaves(gradients)
    assert all(np.any(leaf) and np.isfinite(leaf).all() for leaf in leaves)

    masks, attention = (jax.random.fold_in(key, purpose) for purpose in (0, 1))

    @jax.jit
    def masked_and_logits(params: Any, batch: Batch) -> tuple[Any, jax.Array]:
        tokens = mask_batch(config, batch, jax.random.split(masks, 3))
        given = tokens.inputs, batch.scored, attention
        vectors = TASK.network(config).apply({"params": params}, *given)
        return tokens, seq2seq.logits(encoder.readout(params), vectors)

    tokens, logits = jax.tree.map(np.asarray, masked_and_logits(params, batch()))
    logits = logits.astype(np.float64)
    expected = 0.0
    for row, slot in zip(*np.nonzero(tokens.scored), strict=True):
        all_logits = logits[row, tokens.positions[row, slot]]
        expected += np.log(np.exp(all_logits).sum()) - all_logits[tokens.targets[row, slot]]
    np.testing.assert_allclose(total, expected, rtol=1e-5)


@pytest.fixture(scope="module")
def texts(written: Callable) -> Dataset:
    draw = random.Random(0)
    return written({str(n): "".join(draw.choices("abc \n", k=n)) for n in (1, 50, 20, 33)})


@pytest.mark.slow
@each_kind
def test_evaluation_does_not_depend_on_how_it_is_batched(
    kind: str, params: Any, texts: Dataset
) -> None:
    def evaluator(batch_size: int) -> Any:
        evaluation = Evaluation(batch_size=batch_size, tokens_per_document=LENGTH)
        attention = Attention(kind=kind, clusters=4)
        config = dataclasses.replace(CONFIG, evaluation=evaluation, attention=attention)
        return TASK.evaluator(EvaluationRequest(config, texts, "test"))

    alone, together = evaluator(1), evaluator(3)
    variables = Variables(params)
    one, three = alone(variables), together(variables)
    assert one.summary == three.summary
    rows = one.rows["documents"]
    for row, same in zip(rows, three.rows["documents"], strict=True):
        assert row == {**same, "bits": pytest.approx(same["bits"], rel=1e-5)}
    metrics = one.metrics
    assert metrics["accuracy"] == three.metrics["accuracy"]
    assert metrics["masked_tokens"] == sum(row["masked_tokens"] for row in rows) > 8
    bits = sum(row["bits"] for row in rows) / metrics["masked_tokens"]
    assert metrics["bits_per_masked_token"] == pytest.approx(bits)
    begun = alone(variables, whole=False)
    assert 0 < begun.metrics["masked_tokens"] < metrics["masked_tokens"]
    assert alone(variables, Control(lambda: True)) is None
    assert alone.sample(variables, 0, Control(lambda: True)) is None
    # Brackets enclose a masked token: the prediction and, where that is wrong, the true token.
    (document,) = texts.split("test").document(0).tolist()
    assert alone.sample(variables, 0).endswith(f"|{chr(document)}]\n")


def test_entropy_is_of_the_shares_of_tokens(texts: Dataset) -> None:
    tokens = np.array([3] * 4 + [0] * 2 + [9, 7], np.uint8)
    np.testing.assert_allclose(token_entropy(tokens), 0.5 + 0.5 + 3 / 8 + 3 / 8)
    assert token_entropy(tokens[:4]) == 0
    both = dataclasses.replace(texts, splits={"validation": texts.split("test")})
    name, bits = TASK.baseline(CONFIG, both)
    assert name == "entropy of single tokens" and 1 < bits < math.log2(5)
    assert TASK.baseline(CONFIG, texts) is None, "without validation data"


def test_an_encoder_has_no_memory_to_take_away(texts: Dataset) -> None:
    with pytest.raises(ConfigError, match="--ablate=state is for language models"):
        TASK.evaluator(EvaluationRequest(CONFIG, texts, "test", ablate="state"))


def test_keys_that_nothing_reads_are_not_trained(texts: Dataset) -> None:
    config = dataclasses.replace(CONFIG, attention=Attention(kind="reformer"))
    with pytest.raises(ConfigError, match="'reformer' takes the queries for keys, whose projec"):
        TASK.resolve(config, texts)


def test_the_mask_needs_an_id(texts: Dataset) -> None:
    small = dataclasses.replace(CONFIG.encoder, vocab_size=256)
    with pytest.raises(ConfigError, match="bytes with 257 ids, the mask included; set it to 0"):
        TASK.resolve(dataclasses.replace(CONFIG, encoder=small), texts)
    free = dataclasses.replace(CONFIG.encoder, vocab_size=0)
    written = TASK.resolve(dataclasses.replace(CONFIG, encoder=free), texts)
    assert written.encoder.vocab_size == 257
