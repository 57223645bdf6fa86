"""Tests that the ends of documents are scored: once, in tokens and not in bytes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brt import tasks
from brt.config import Config, Data, Evaluation, Model, Training
from brt.data import lanes, preparation
from brt.data.preparation import Dataset
from brt.errors import ConfigError
from brt.tasks.arguments import EvaluationRequest, OtherModel
from brt.tasks.language_modeling import evaluation
from brt.tasks.language_modeling.comparison import ComparisonEvaluator
from brt.tasks.language_modeling.evaluation import DocumentEvaluator
from brt.tasks.language_modeling.windows import WindowEvaluator
from brt.types import Variables

END, WINDOW = 1, 4
LENGTHS = [1, 3, 4, 7, 8, 21]
MODEL = Model(
    layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=WINDOW, vocab_size=256,
    end_ids=(END, 2), dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = tmp_path_factory.mktemp("documents")
    for i, length in enumerate(LENGTHS):
        (folder / f"{i}.txt").write_text("abcdefghijklmnopqrstuvwxyz"[i : i + length])
    (folder / "other").write_text("z" * 30)
    data = Data(
        train=(str(folder / "*.txt"),), validation=(str(folder / "other"),), test_fraction=0.0,
        cache_dir=str(folder / "cache"),
    )  # fmt: skip
    training = Training(batch_size=2, segment_length=2 * WINDOW, loss_chunk=4, plots=False)
    return Config(model=MODEL, data=data, training=training, evaluation=Evaluation(batch_size=2))


@pytest.fixture(scope="module")
def dataset(config: Config) -> Dataset:
    return tasks.from_config(config).open(config, progress=False)


@pytest.fixture(scope="module")
def variables(random_params: Callable) -> Variables:
    return Variables(random_params(MODEL))


def without(config: Config) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, score_ends="no"))


def targets(batches: list[Any]) -> list[int]:
    return sorted(np.concatenate([b.targets[b.scored] for b in batches]).tolist())


def test_every_token_and_every_end_is_a_target_once_and_no_end_is_an_input(
    config: Config, dataset: Dataset
) -> None:
    reader = tasks.from_config(config).reader(config, dataset)
    store = dataset.split("train")
    trained = [reader[step] for step in range(reader.steps_per_epoch)]
    documents = evaluation.documents(config, dataset, "train")
    evaluated = [
        batch for batch, _ in lanes.evaluation_batches(
            documents, batch_size=3, segment_length=8, window=WINDOW
        )
    ]  # fmt: skip
    text = [*store.tokens[:].tolist(), *[END] * len(LENGTHS)]
    for batches in (trained, evaluated):
        assert targets(batches) == sorted(text)
        for batch in batches:
            assert not np.any(batch.inputs[batch.scored] == END)
    # The input before an end is the last token of its document, also at the start of a block.
    last = {int(store.document(i)[-1]) for i in range(len(store))}
    before = np.concatenate([b.inputs[b.scored & (b.targets == END)] for b in evaluated])
    assert {*before.tolist()} == last
    plain = tasks.from_config(config).reader(without(config), dataset)
    steps = range(plain.steps_per_epoch)
    assert targets([plain[step] for step in steps]) == sorted(store.tokens[:].tolist())


@pytest.mark.parametrize("limit", [1, 4, 7, 8])
def test_a_limit_of_tokens_leaves_out_the_ends_that_are_behind_it(
    config: Config, dataset: Dataset, limit: int
) -> None:
    batches = [
        batch for batch, _ in lanes.evaluation_batches(
            evaluation.documents(config, dataset, "train"), batch_size=2, segment_length=8,
            window=WINDOW, tokens_per_document=limit,
        )
    ]  # fmt: skip
    expected = sum(length < limit for length in LENGTHS)
    assert sum(int(np.sum(b.targets[b.scored] == END)) for b in batches) == expected
    assert sum(int(b.scored.sum()) for b in batches) == sum(min(n + 1, limit) for n in LENGTHS)


def evaluated(config: Config, dataset: Dataset, variables: Variables, **given: Any) -> Any:
    result = DocumentEvaluator(EvaluationRequest(config, dataset, "train", **given))(variables)
    assert result is not None
    return result


@pytest.mark.slow
def test_evaluation_counts_ends_in_tokens_and_not_in_bytes(
    config: Config, dataset: Dataset, variables: Variables
) -> None:
    """The bits are those that a scorer of single texts gives for the text and its end token."""
    found, plain = (evaluated(c, dataset, variables) for c in (config, without(config)))
    assert found.metrics["tokens"] == plain.metrics["tokens"] + len(LENGTHS)
    for name in ("bytes", "characters", "words"):
        assert found.metrics[name] == plain.metrics[name]
    assert "ends of documents" in found.text and "ends of documents" not in plain.text
    assert found.metrics["protocol"] != plain.metrics["protocol"]
    scorer = tasks.from_config(config).scorer(config, dataset.tokenizer)
    store = dataset.split("train")
    for i, row in enumerate(found.rows["documents"]):
        nats = scorer(variables, np.append(store.document(i), END).astype(np.int32))
        assert row["bits"] == pytest.approx(float(nats.sum()) / np.log(2), rel=1e-5)
        assert row["tokens"] == len(nats) and row["bytes"] == LENGTHS[i]


@pytest.mark.slow
def test_windows_and_comparisons_score_the_same_ends(
    config: Config, dataset: Dataset, variables: Variables
) -> None:
    found = evaluated(config, dataset, variables)
    windows = WindowEvaluator(EvaluationRequest(config, dataset, "train", windows=(WINDOW, 16)))(
        variables
    )
    assert windows is not None
    assert windows.metrics["windows"][0]["bits"] == pytest.approx(found.metrics["bits"], rel=1e-5)
    assert sum(windows.metrics["positions"]["tokens"]) == found.metrics["tokens"]
    for other in (config, without(config)):
        theirs = OtherModel("other", 0, other, dataset, variables)
        request = EvaluationRequest(config, dataset, "train", other=theirs)
        result = ComparisonEvaluator(request)(variables)
        assert result is not None
        expected = evaluated(other, dataset, variables).metrics
        for metrics in (result.metrics, result.metrics["other"]):
            assert metrics["bits"] == pytest.approx(expected["bits"], rel=1e-6)
            assert metrics["tokens"] == expected["tokens"]
        assert sum(row["tokens"] for row in result.metrics["classes"]) == expected["tokens"]


def test_only_the_last_part_of_a_document_that_is_divided_has_an_end(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("It was late.\n\n" * 400)
    data = Data(train=(str(tmp_path / "a.txt"),), cache_dir=str(tmp_path / "cache"))
    divided = preparation.prepare(data, progress=False)
    scored = {s: evaluation.documents(config, divided, s).end_id for s in divided.splits}
    assert scored == {"train": -1, "validation": -1, "test": END}


def test_models_without_end_tokens_score_none(config: Config, dataset: Dataset) -> None:
    task = tasks.from_config(config)
    new = dataclasses.replace(config, model=dataclasses.replace(MODEL, end_ids=()))
    assert task.resolve(new, dataset).data.score_ends == "no"
    assert task.resolve(config, dataset).data.score_ends == "yes"
    asked = dataclasses.replace(new, data=dataclasses.replace(new.data, score_ends="yes"))
    with pytest.raises(ConfigError, match=r"Data\.score_ends = 'yes' needs a model with an end"):
        task.resolve(asked, dataset)
    assert evaluation.documents(new, dataset, "train") is dataset.split("train")


def test_a_run_goes_on_as_it_began(config: Config, dataset: Dataset) -> None:
    task = tasks.from_config(config)
    with_ends, plain = task.reader(config, dataset), task.reader(without(config), dataset)
    for began, resumed in ((with_ends, plain), (plain, with_ends)):
        iterator, other = lanes.BatchIterator(began), lanes.BatchIterator(resumed)
        with pytest.raises(ConfigError, match="score_ends was"):
            other.set_state(iterator.get_state())
        iterator.set_state(iterator.get_state())
        iterator.close()
        other.close()
    state = lanes.BatchIterator(plain)
    state.set_state({k: v for k, v in state.get_state().items() if k != "score_ends"})
    state.close()
