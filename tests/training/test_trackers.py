"""Tests that W&B and MLflow get all metrics, also after a restart, and never stop a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers
from brt.config import Config, Logging
from brt.errors import ConfigError
from brt.training import metrics, workdir
from brt.training.metrics import MetricsWriter, read_metrics

RECORDED = """
from pathlib import Path
from brt.config import Config, Logging
from brt.training import metrics, workdir

run, said = workdir.create(Path("a")), []
for step in (1, 2):
    (tracker,) = metrics.start_trackers(Config(logging=Logging({}="all")), run, said.append)
    tracker.write(step, {{"train/loss": 0.5}})
    tracker.close()
assert not said, said
"""
RECORDED_BY_WANDB = RECORDED.format("wandb_project")
RECORDED_BY_MLFLOW = f"""{RECORDED.format("mlflow_experiment")}
import mlflow

(found,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
assert found.data.metrics == {{"train/loss": 0.5}}
history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "train/loss")
assert [metric.step for metric in history] == [1, 2]
"""
CONFIG = Config(logging=Logging(wandb_project="books", mlflow_experiment="all"))


class Service(ModuleType):
    """A replacement of both tracker modules that records the calls."""

    def __init__(self) -> None:
        super().__init__("service")
        self.begun, self.told, self.ended = [], [], 0
        self.fails, self.new = False, "w1"
        self.info = SimpleNamespace(run_id="m1")

    def init(self, **given: Any) -> "Service":
        self.begun.append(given)
        self.id = given.get("id") or self.new
        return self

    def log(self, numbers: dict, step: int) -> None:
        if self.fails:
            raise RuntimeError("the network\nis gone")
        self.told.append((step, numbers))

    def finish(self) -> None:
        self.ended += 1

    get_tracking_uri = MlflowClient = lambda self: ""
    set_experiment = log_dict = lambda self, *given: self.begun.append(given)
    end_run, log_metrics = finish, log

    def start_run(self, **given: Any) -> "Service":
        return self.init(**given)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    """Replaces the modules of W&B and MLflow and returns the replacements by name."""
    made = {name: Service() for name in ("wandb", "mlflow")}
    for name, service in made.items():
        monkeypatch.setitem(sys.modules, name, service)
    return made


def test_all_trackers_get_the_same_metrics_and_resume(
    services: dict[str, Service], tmp_path: Path
) -> None:
    run, said = workdir.create(tmp_path / "a"), []
    for start in (0, 20):
        found = metrics.start_trackers(CONFIG, run, said.append)
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
    ids = json.loads((run.path / "trackers.json").read_text())
    assert (ids["wandb"], ids["mlflow"]) == ("w1", "m1")


def started_with(service: Service, path: Path, said: list[str]) -> str | None:
    """Starts the trackers of a run directory; returns the id of the run that W&B continues."""
    for tracker in metrics.start_trackers(CONFIG, workdir.create(path), said.append):
        tracker.close()
    return service.begun[-1]["id"]


def test_a_copy_begins_new_runs_and_a_moved_run_keeps_its_own(
    services: dict[str, Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, said = services["wandb"], []
    first, copy, moved = (tmp_path / name for name in ("first", "copy", "moved"))
    assert started_with(wandb, first, said) is None
    shutil.copytree(first, copy)
    wandb.new = "w2"
    assert started_with(wandb, copy, said) is None, "the copy must not write into the first's run"
    assert len(said) == 1 and str(copy) in said[0] and str(first) in said[0]
    assert started_with(wandb, copy, said) == "w2" and started_with(wandb, first, said) == "w1"
    first.rename(moved)
    assert started_with(wandb, moved, said) == "w1"
    # The directory is moved to another disk: it is copied, and the original is deleted.
    shutil.copytree(moved, first)
    shutil.rmtree(moved)
    assert started_with(wandb, first, said) == "w1" and len(said) == 1
    monkeypatch.setattr("socket.gethostname", lambda: "restarted")
    assert started_with(wandb, first, said) == "w1", "another machine mounts the same disk"
    monkeypatch.setattr("socket.gethostname", lambda: "other")
    shutil.copytree(first, moved)
    shutil.rmtree(first)
    moved.rename(first)
    wandb.new = "w3"
    assert started_with(wandb, first, said) is None, "a copy on another machine, at the same path"


def test_a_service_that_fails_is_off_after_one_warning(
    services: dict[str, Service], tmp_path: Path
) -> None:
    run, said = workdir.create(tmp_path), []
    writer = MetricsWriter(run, 0, said.append, metrics.start_trackers(CONFIG, run, said.append))
    services["wandb"].fails = True
    for step in (1, 2):
        writer.write(step, {"train/loss": 0.5})
    writer.close()
    assert said == ["wandb is off: the network is gone; metrics.jsonl is still written"]
    assert [step for step, _ in services["mlflow"].told] == [1, 2]
    assert [r["step"] for r in read_metrics(run.metrics)] == [1, 2]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    setting = {"wandb": "wandb_project", "mlflow": "mlflow_experiment"}[name]
    config = Config(logging=Logging(**{setting: "books"}))
    with pytest.raises(ConfigError) as caught:
        metrics.requested_trackers(config, print)
    assert str(caught.value) == (
        f"Logging.{setting} = 'books' needs the extra {name}: pip install 'brt[{name}]', or leave "
        "it out"
    )


def test_mlflow_that_could_record_nothing_is_refused_before_training(
    services: dict[str, Service],
) -> None:
    def refuse() -> None:
        raise RuntimeError("the filesystem\nis in maintenance mode")

    services["mlflow"].MlflowClient = refuse
    services["mlflow"].get_tracking_uri = lambda: "file:///runs"
    with pytest.raises(ConfigError) as caught:
        metrics.requested_trackers(CONFIG, print)
    text = str(caught.value)
    assert text.startswith(
        "Logging.mlflow_experiment = 'all': MLflow cannot record at file:///runs"
    )
    assert "(the filesystem is in maintenance mode)" in text and "MLFLOW_TRACKING_URI" in text


def test_the_real_mlflow_records_with_its_own_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow changes the logging of its process, so the test uses a new process."""
    pytest.importorskip("mlflow", reason="needs brt[mlflow]")
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    subprocess.run([sys.executable, "-c", RECORDED_BY_MLFLOW], cwd=tmp_path, check=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "ftp://nobody")
    done = subprocess.run(
        [sys.executable, "-c", RECORDED_BY_MLFLOW], cwd=tmp_path, capture_output=True, text=True
    )
    assert "MLflow cannot record at ftp://nobody" in done.stderr.splitlines()[-1]


def test_the_real_wandb_records_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs brt[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    subprocess.run([sys.executable, "-c", RECORDED_BY_WANDB], cwd=tmp_path, check=True)
    assert list(tmp_path.glob("a/wandb/offline-run-*/*.wandb"))
