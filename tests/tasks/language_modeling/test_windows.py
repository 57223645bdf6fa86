"""Tests `brt.evaluate --windows`, which compares several windows on the same documents."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_settings import with_settings

from brt import tasks
from brt.config import Config, Data, Evaluation, Model, Training
from brt.config.model import Window
from brt.errors import ConfigError
from brt.evaluate import _windows
from brt.tasks.arguments import EvaluationRequest
from brt.tasks.differences import difference_of_runs, paired_difference
from brt.tasks.language_modeling.evaluation import DocumentEvaluator
from brt.tasks.language_modeling.windows import WindowEvaluator
from brt.types import Variables

MODEL = Model(
    layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=32, positions="rotary",
    dtype="float32", sliding=Window(sinks=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def request_and_variables(
    random_params: Callable, tmp_path_factory: pytest.TempPathFactory
) -> tuple:
    """Returns the request to evaluate three test documents, and random variables."""
    folder: Path = tmp_path_factory.mktemp("documents")
    for i, repeats in enumerate((9, 3, 5)):
        (folder / f"{i}.txt").write_text(f"Document {i} says what it says. " * repeats)
    (folder / "other").write_text("A document to train on. " * 100)
    data = Data(train=(str(folder / "other"),), test=(str(folder / "*.txt"),))
    config = Config(
        model=MODEL, data=data, training=Training(segment_length=64, plots=False),
        evaluation=Evaluation(batch_size=2),
    )  # fmt: skip
    task = tasks.from_config(config)
    dataset = task.open(config, progress=False)
    config = task.resolve(config, dataset)
    variables = Variables(random_params(config.model), {})
    return EvaluationRequest(config, dataset, "test", windows=(64, 16, 32)), variables


@pytest.mark.slow
def test_each_window_gives_the_bits_of_an_evaluation_with_it(request_and_variables: tuple) -> None:
    request, variables = request_and_variables
    result = WindowEvaluator(request)(variables)
    assert result is not None
    rows = result.metrics["windows"]
    assert [row["window"] for row in rows] == [16, 32, 64]
    for row in rows:
        settings = {"window": row["window"], "Window.block": 16}
        model = with_settings(request.config.model, settings)
        config = dataclasses.replace(request.config, model=model)
        alone = DocumentEvaluator(request._replace(config=config, windows=()))(variables)
        assert alone is not None
        np.testing.assert_allclose(row["bits_per_byte"], alone.metrics["bits_per_byte"], rtol=1e-6)
    assert rows[-1]["difference"] == 0
    np.testing.assert_allclose(
        rows[0]["difference"], rows[0]["bits_per_byte"] - rows[-1]["bits_per_byte"], rtol=1e-6
    )
    assert rows[0]["difference_95"] > 0


@pytest.mark.slow
def test_bits_by_position_add_up_to_all_bits(request_and_variables: tuple) -> None:
    request, variables = request_and_variables
    request = request._replace(windows=(64, 16))
    metrics = WindowEvaluator(request)(variables).metrics  # type: ignore[union-attr]
    tokens = np.asarray(metrics["positions"]["tokens"])
    assert tokens.sum() == metrics["tokens"]
    for row in metrics["windows"]:
        bits = np.asarray(row["bits_per_token_by_position"], float)
        np.testing.assert_allclose(bits @ tokens, row["bits"], rtol=1e-6)
    # If the smallest window contains all earlier tokens, the bits are the same for every window.
    first = [row["bits_per_token_by_position"][0] for row in metrics["windows"]]
    np.testing.assert_allclose(first, first[0], rtol=1e-6)


def test_the_interval_is_that_of_a_ratio_of_sums() -> None:
    nats, other = np.array([30.0, 50.0, 20.0]), np.array([28.0, 41.0, 19.0])
    sizes = np.array([10, 30, 8])
    value, half = paired_difference(nats, other, sizes)
    bits = (nats - other) / math.log(2)
    assert value == pytest.approx(bits.sum() / 48)
    error = math.sqrt(3 / 2 * ((bits - value * sizes) ** 2).sum()) / 48
    # 4.302653 is the 97.5 % quantile of Student's t distribution with 2 degrees of freedom.
    assert half == pytest.approx(4.302653 * error, rel=1e-6)
    assert paired_difference(nats[:1], other[:1], sizes[:1]).half_width is None


def test_an_interval_over_seeds_and_documents_holds_the_difference_of_all_runs() -> None:
    """It holds the true difference in 95 % of experiments, whatever varies most."""
    rng = np.random.default_rng(0)

    def holds(of_documents: float, of_seeds: float) -> bool:
        sizes = rng.integers(50, 150, 30)

        def runs(bits: float) -> np.ndarray:
            seeds = rng.normal(bits, of_seeds, (3, 1))
            return math.log(2) * (sizes * seeds + rng.normal(0, of_documents, (3, 30)))

        value, half = difference_of_runs(runs(1.3), runs(1.0), sizes)
        return abs(value - 0.3) < half

    for of_documents, of_seeds in ((20.0, 0.0), (1.0, 0.1), (20.0, 0.05)):
        assert 0.91 < np.mean([holds(of_documents, of_seeds) for _ in range(400)]) <= 1


def test_windows_that_cannot_be_compared_are_refused(request_and_variables: tuple) -> None:
    request, _ = request_and_variables
    with pytest.raises(ConfigError, match="two measurements"):
        WindowEvaluator(request._replace(ablate="cache"))
    model = with_settings(request.config.model, {"Recurrence.layers": (0,), "Recurrence.states": 4})
    recurrent = dataclasses.replace(request.config, model=model)
    with pytest.raises(ConfigError, match="layer 0 is recurrent: its window"):
        WindowEvaluator(request._replace(config=recurrent))
    with pytest.raises(ConfigError, match="must be numbers of tokens"):
        _windows("256,many")
    assert _windows("") == () and _windows("256, 512") == (256, 512)
