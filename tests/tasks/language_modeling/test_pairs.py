"""Tests the loss, the evaluation and the generation of the completions of pairs."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_decoder import write_chain
from tiny_runs import metrics, state_hash, tiny_config

import brt
from brt import tasks
from brt.config import Config, Data, Decoding, Evaluation, Model, Training
from brt.data import preparation, tokenizers
from brt.data.lanes import LaneReader
from brt.data.preparation import Dataset
from brt.errors import ConfigError
from brt.generation.session import Session
from brt.layers.sections import Recurrence
from brt.models.decoder import new_state
from brt.tasks.arguments import EvaluationRequest, LossInputs
from brt.tasks.language_modeling import completions, objective
from brt.tasks.language_modeling.evaluation import DocumentEvaluator, TextScorer
from brt.training.step import MetricAccumulator, StepMetrics
from brt.types import Variables

MODEL = Model(
    layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=4, vocab_size=256,
    kinds=(Recurrence(layers=(0,), states=4),), end_ids=(0,),
)  # fmt: skip
# The third prompt is longer than a segment, and the second completion spans two segments.
PAIRS = [("ab", "cd"), ("a text ", "that goes on"), ("many words " * 4, "end"), ("x", "y")]
COLUMNS = ("prompt=a", "completion=b")


def write(place: Path, name: str, pairs: list[tuple[str, str]] = PAIRS) -> str:
    (place / name).write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in pairs))
    return str(place / name)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    place = tmp_path_factory.mktemp("pairs")
    data = Data(
        train=(write(place, "a.jsonl"),), columns=COLUMNS, validation_fraction=0.0,
        test_fraction=0.0, cache_dir=str(place / "cache"),
    )  # fmt: skip
    return preparation.prepare(data, progress=False)


def config(segment: int, **more: Any) -> Config:
    return Config(
        model=MODEL,
        training=Training(batch_size=2, segment_length=segment, loss_chunk=8),
        evaluation=Evaluation(batch_size=2, tokens_per_document=4),
        **more,
    )


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return random_params(MODEL)


@pytest.fixture(scope="module")
def nats(params: Any) -> list[float]:
    """The nats of each completion and its end, from the scores of the whole text as one segment."""
    score, found = TextScorer(config(64), 0), []
    for prompt, completion in PAIRS:
        tokens = np.frombuffer(f"{prompt}{completion}\0".encode(), np.uint8).astype(np.int32)
        found.append(score(Variables(params, {}), tokens)[len(prompt) :].sum())
    return found


def test_the_bits_of_completions_are_those_of_the_whole_text(
    dataset: Dataset, params: Any, nats: list[float]
) -> None:
    """Whole pairs are read even if Evaluation.tokens_per_document is smaller."""
    evaluator = DocumentEvaluator(EvaluationRequest(config(8), dataset, "train"))
    size = sum(len(completion) for _, completion in PAIRS)
    for whole in (True, False):
        metrics = evaluator(Variables(params, {}), whole=whole).metrics
        assert (metrics["bytes"], metrics["tokens"]) == (size, size + len(PAIRS))
        assert metrics["bits"] * np.log(2) == pytest.approx(sum(nats), rel=1e-5)
    assert not evaluator.partial


def test_the_training_loss_counts_the_same_tokens(
    dataset: Dataset, params: Any, nats: list[float]
) -> None:
    store = dataclasses.replace(dataset.split("train"), end_id=0)
    reader = LaneReader(store=store, batch_size=1, segment_length=8, block_length=4, seed=0)
    carry, total, count = new_state(MODEL, 1), 0.0, 0
    loss = jax.jit(lambda batch, carry: objective.loss(config(8), params, inputs(batch, carry)))

    def inputs(batch: Any, carry: Any) -> LossInputs:
        return LossInputs(batch, jax.random.key(0), carry, {})

    for step in range(reader.steps_per_epoch):
        _, aux = loss(reader[step], carry)
        carry, total, count = aux.carry, total + float(aux.nats), count + int(aux.count)
    assert count == int(store.scored_counts.sum())
    assert total == pytest.approx(sum(nats), rel=1e-5)


def test_a_model_without_an_end_gets_one_for_pairs(dataset: Dataset) -> None:
    task = tasks.from_config(config(8))
    without = dataclasses.replace(config(8), model=dataclasses.replace(MODEL, end_ids=()))
    assert task.resolve(without, dataset).model.end_ids == (dataset.tokenizer.bos_id,)
    plain = dataclasses.replace(dataset.split("train"), spans=None)
    other = dataclasses.replace(dataset, splits={"train": plain})
    assert task.resolve(without, other).model.end_ids == ()


def test_steps_that_read_prompts_alone_are_no_usual_losses() -> None:
    """A median of zeros would make every other loss a jump."""
    accumulator = MetricAccumulator(spike_factor=2.0)
    for step in range(1, 90):
        accumulator.add(step, StepMetrics(np.float32(0), np.float32(0), np.float32(0), {}))
    accumulator.add(90, StepMetrics(np.float32(9), np.float32(3), np.float32(1), {}))
    accumulator.flush()
    assert accumulator.limit(99) == np.inf


def test_plain_documents_have_no_completions(written: Callable) -> None:
    with pytest.raises(ConfigError, match="--generate"):
        DocumentEvaluator(
            EvaluationRequest(config(8), written({"a": "text"}), "test", generate=True)
        )


@pytest.mark.slow
def test_completions_are_generated_and_compared(tmp_path: Path) -> None:
    """The model writes "dot" after every prompt, and then an end token."""
    write_chain(tmp_path / "chain", {"": "d", "d": "o", "o": "t", "t": "<|im_end|>"})
    model = brt.load(tmp_path / "chain")
    data = Data(
        train=(write(tmp_path, "a.jsonl", [("x", "dot"), ("abc", "dodo"), ("word " * 30, "dot")]),),
        tokenizer=str(tmp_path / "chain/tokenizer.json"), columns=COLUMNS, validation_fraction=0.0,
        test_fraction=0.0, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    dataset = preparation.prepare(data, progress=False)
    asked = dataclasses.replace(model.config, decoding=Decoding(max_length=9), data=data)
    request = EvaluationRequest(asked, dataset, "train", generate=True)
    result = DocumentEvaluator(request)(model._saved.variables)
    assert [row["prediction"] for row in result.rows["predictions"]] == ["dot"] * 3
    assert [row["reference"] for row in result.rows["predictions"]] == ["dot", "dodo", "dot"]
    assert result.metrics["exact"] == pytest.approx(200 / 3)
    assert result.metrics["rouge"]["rougeL"]["f1"] == pytest.approx(200 / 3)
    session = Session(asked, model._saved.variables, bos_id=1, known_ids=model.tokenizer.vocab_size)
    one = completions.generated(asked, session, dataset.split("train"), model.tokenizer)
    assert [summary.prediction for summary in one] == ["dot"] * 3


@pytest.mark.slow
def test_a_resumed_run_of_pairs_ends_with_the_same_bits(tmp_path: Path) -> None:
    train = write(tmp_path, "a.jsonl", [(f"{'words ' * i}{i}", f"{i} words") for i in range(1, 9)])
    rest = write(tmp_path, "b.jsonl")
    usual = tiny_config(tmp_path)
    data = dataclasses.replace(
        usual.data, train=(train,), validation=(rest,), test=(), columns=COLUMNS, test_fraction=0.0
    )

    def run(name: str, steps: int) -> None:
        training = dataclasses.replace(usual.training, steps=steps)
        brt.train(dataclasses.replace(usual, data=data, training=training), tmp_path / name)

    run("whole", 12)
    run("parts", 5)
    run("parts", 12)
    assert state_hash(tmp_path / "whole") == state_hash(tmp_path / "parts")
    assert metrics(tmp_path / "whole")[-1] == metrics(tmp_path / "parts")[-1]
    assert tokenizers.load("bytes").bos_id in brt.load(tmp_path / "parts").config.model.end_ids
