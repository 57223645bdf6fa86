"""W&B and MLflow are told what metrics.jsonl has, go on after a restart, and stop nothing."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from brt.config import Config, Logging
from brt.errors import ConfigError
from brt.training import trackers, workdir
from brt.training.metrics import MetricsWriter, read_metrics

CONFIG = Config(logging=Logging(wandb_project="books", mlflow_experiment="all"))


class Service(ModuleType):
    """Both modules in one: notes what it is told."""

    def __init__(self) -> None:
        super().__init__("service")
        self.begun, self.told, self.ended = [], [], 0
        self.fails, self.id = False, "w1"
        self.info = SimpleNamespace(run_id="m1")

    def init(self, **given: Any) -> "Service":
        self.begun.append(given)
        return self

    def log(self, numbers: dict, step: int) -> None:
        if self.fails:
            raise RuntimeError("the network\nis gone")
        self.told.append((step, numbers))

    def finish(self) -> None:
        self.ended += 1

    set_experiment = log_dict = lambda self, *given: self.begun.append(given)
    end_run, log_metrics = finish, log

    def start_run(self, **given: Any) -> "Service":
        return self.init(**given)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    made = {name: Service() for name in ("wandb", "mlflow")}
    for name, service in made.items():
        monkeypatch.setitem(sys.modules, name, service)
    return made


def test_both_are_told_the_same_and_go_on(services: dict[str, Service], tmp_path: Path) -> None:
    run, said = workdir.create(tmp_path / "a"), []
    for start in (0, 20):
        found = trackers.started(CONFIG, run, said.append)
        writer = MetricsWriter(run, start, said.append, found)
        writer.write(start + 10, {"train/loss": 0.5, "train/norm": float("inf")})
        writer.close()
    assert not said and [r["train/norm"] for r in read_metrics(run.metrics)] == [None, None]
    for service in services.values():
        assert service.told == [(10, {"train/loss": 0.5}), (30, {"train/loss": 0.5})]
        assert service.ended == 2
    first, second = services["wandb"].begun
    assert (first["project"], first["name"], first["id"], second["id"]) == (
        "books", "a", None, "w1",
    )  # fmt: skip
    assert first["config"]["Logging"]["wandb_project"] == "books"
    assert services["mlflow"].begun[0] == ("all",)
    assert services["mlflow"].begun[-2]["run_id"] == "m1"
    assert json.loads((run.path / "trackers.json").read_text()) == {"wandb": "w1", "mlflow": "m1"}


def test_a_service_that_fails_is_off_after_one_warning(
    services: dict[str, Service], tmp_path: Path
) -> None:
    run, said = workdir.create(tmp_path), []
    writer = MetricsWriter(run, 0, said.append, trackers.started(CONFIG, run, said.append))
    services["wandb"].fails = True
    for step in (1, 2):
        writer.write(step, {"train/loss": 0.5})
    writer.close()
    assert said == ["wandb is off: the network is gone; metrics.jsonl goes on"]
    assert [step for step, _ in services["mlflow"].told] == [1, 2]
    assert [r["step"] for r in read_metrics(run.metrics)] == [1, 2]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_one_that_is_not_installed_is_refused_by_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    setting = {"wandb": "wandb_project", "mlflow": "mlflow_experiment"}[name]
    config = dataclasses.replace(Config(), logging=Logging(**{setting: "books"}))
    with pytest.raises(ConfigError) as caught:
        trackers.wanted(config, print)
    assert str(caught.value) == (
        f"Logging.{setting} = 'books' needs the extra {name}: pip install 'brt[{name}]', or leave "
        "it out"
    )


def test_nobody_is_told_by_default(tmp_path: Path) -> None:
    run = workdir.create(tmp_path)
    assert trackers.started(Config(), run, print) == []
    assert not (tmp_path / "trackers.json").exists()


def test_a_line_of_metrics_says_when(tmp_path: Path) -> None:
    import time

    run, before = workdir.create(tmp_path), time.time()
    writer = MetricsWriter(run, 0, print)
    writer.write(1, {"train/loss": 0.5})
    (first,) = read_metrics(run.metrics)
    writer.write(1, {"eval/loss": 0.5})
    writer.close()
    (record,) = read_metrics(run.metrics)
    assert before - 1 <= record["perf/time"] <= time.time() + 1
    assert record["perf/time"] == first["perf/time"], "when it was begun"
