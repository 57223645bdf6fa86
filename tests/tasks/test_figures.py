"""Tests metrics on rows of uneven length, some truncated, in padded batches.

Every metric is compared with sums over rows that are read alone, without padding.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from brt import tasks
from brt.config import (
    Config,
    Data,
    Decoding,
    Evaluation,
    Model,
    Pairs,
    Seq2Seq,
    Training,
)  # fmt: skip
from brt.data.lanes import evaluation_batches as document_batches
from brt.tasks.arguments import EvaluationRequest, LossInputs
from brt.tasks.summarization.preparation import PairReader
from brt.tasks.summarization.task import scored_bytes
from brt.types import Variables

WORDS = "fünf Füchse laufen über den kalten See und ruhen dann am Ufer aus".split()


def text(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


class Case(NamedTuple):
    """A model, its dataset, and the report and rows of an evaluation on the training split."""

    config: Config
    dataset: Any
    params: Any
    report: dict[str, Any]
    rows: list[dict[str, Any]]


def case(config: Config, drawn: Callable[[Config], Any]) -> Case:
    """Evaluates a model with random parameters on the training split."""
    task = tasks.from_config(config)
    dataset = task.open(config, progress=False)
    config = task.resolve(config, dataset)
    params = drawn(config)
    result = task.evaluator(EvaluationRequest(config, dataset, "train"))(Variables(params))
    return Case(config, dataset, params, result.metrics, next(iter(result.rows.values())))


def lines(place: Path, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    (place / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (str(place / "a.jsonl"),)


def summed_loss(found: Case, batches: list[Any]) -> tuple[float, float]:
    """Returns the summed nats and counts of the training loss over separate batches."""
    config, task = found.config, tasks.from_config(found.config)
    loss = jax.jit(partial(task.loss, config))
    carry, model_state = task.initial_carry(config, 1), task.initial_model_state(config)
    inputs = (LossInputs(batch, jax.random.key(1), carry, model_state) for batch in batches)
    aux = [loss(found.params, each)[1] for each in inputs]
    return float(sum(a.nats for a in aux)), float(sum(a.count for a in aux))


def approx(value: float) -> Any:
    return pytest.approx(value, rel=2e-4)


def test_bits_of_documents_equal_the_summed_loss(drawn: Callable, tmp_path: Path) -> None:
    """Documents of uneven length share batches."""
    texts = [text(0, 3), text(1, 40), text(2, 17)]
    config = Config(
        model=Model(
            layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=8, dtype="float32"
        ),
        data=Data(
            train=lines(tmp_path, [{"text": t} for t in texts]), validation_fraction=0.0,
            test_fraction=0.0, cache_dir=str(tmp_path / "cache"),
        ),
        training=Training(segment_length=16, batch_size=1),
        evaluation=Evaluation(batch_size=2),
    )  # fmt: skip
    found = case(config, drawn)
    store = found.dataset.split("train")
    batches = document_batches(store, batch_size=1, segment_length=512, window=8)
    nats, count = summed_loss(found, [batch for batch, _ in batches])
    sizes = [len(t.encode()) for t in texts]
    assert count == found.report["tokens"] == sum(sizes) == found.report["bytes"]
    assert found.report["bits_per_byte"] == approx(nats / math.log(2) / sum(sizes))
    assert found.report["characters"] == sum(map(len, texts))
    assert found.report["bits_per_character"] == approx(
        nats / math.log(2) / found.report["characters"]
    )
    words = sum(len(t.split()) for t in texts)
    assert found.report["word_perplexity"] == approx(math.exp(nats / words))


@pytest.fixture(scope="module")
def summaries(drawn: Callable, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Evaluates on summaries of 3 to 40 words, which are truncated to 14 tokens."""
    place = tmp_path_factory.mktemp("pairs")
    rows = [
        {"id": str(i), "document": text(i, 8 + 9 * i), "summary": text(i + 9, words)}
        for i, words in enumerate((3, 40, 12))
    ]
    config = Config(
        seq2seq=Seq2Seq(
            encoder_layers=1, decoder_layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16,
            dropout=0.0, dtype="float32",
        ),
        pairs=Pairs(
            train=lines(place, rows), validation=(), test=(), tokenizer="train:290",
            max_source_length=40, max_target_length=14, cache_dir=str(place / "cache"),
        ),
        training=Training(task="summarization"), evaluation=Evaluation(batch_size=2),
        decoding=Decoding(max_length=4, beams=1),
    )  # fmt: skip
    return case(config, drawn)


@pytest.mark.slow
def test_bits_of_cut_summaries_are_over_the_bytes_that_are_scored(summaries: Case) -> None:
    store, tokenizer = summaries.dataset.split("train"), summaries.dataset.tokenizer
    assert (store.target_uncut > store.target.lengths).sum() == 2
    gather = PairReader(store=store, batch_size=1).gather
    batches = [gather(np.array([row]), len(store.source[row])) for row in range(3)]
    nats, count = summed_loss(summaries, batches)
    kept = [tokenizer.decode(store.target[row]) for row in range(3)]
    assert kept[0] == store.summary(0) and len(kept[1]) < len(store.summary(1)) / 2
    size = sum(len(k.encode()) for k in kept)
    report = summaries.report
    assert report["tokens"] == count == len(store.target.values)
    assert report["bytes"] == scored_bytes(store, tokenizer).sum() == size
    assert report["bits_per_token"] == approx(nats / math.log(2) / count)
    assert report["bits_per_byte"] == approx(nats / math.log(2) / size)
    rows = summaries.rows
    assert [row["bytes"] for row in rows] == [len(k.encode()) for k in kept]
    assert sum(row["bits"] for row in rows) == approx(nats / math.log(2))


def test_training_and_held_out_curves_of_summaries_share_a_measure(summaries: Case) -> None:
    """Training and evaluation report the same bits per byte for the same summaries."""
    units = tasks.from_config(summaries.config).units_per_token(summaries.config, summaries.dataset)
    assert summaries.report["bits_per_token"] / units == approx(summaries.report["bits_per_byte"])
