"""Tests the files and progress of evaluations, and evaluations that follow a training run.

The tests of these imitate the trainer: `time.sleep` is replaced, and each call of the follower adds
or removes checkpoints.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from brt import evaluate, tasks
from brt.checkpointing.writer import CheckpointWriter
from brt.config import Checkpoint, Config, Data, Evaluation, Model, Training
from brt.config_io import config_json
from brt.data import preparation
from brt.errors import CheckpointError, ConfigError, NonFiniteError
from brt.tasks.report import EvaluationResult
from brt.training import data_manifest, evaluations, following, saved_model
from brt.training import workdir as workdirs
from brt.training.workdir import Workdir

STEPS = [10, 20, 30]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, random_params: Callable) -> Workdir:
    """Returns the directory of a finished run with checkpoints at every step in STEPS."""
    directory = tmp_path_factory.mktemp("run")
    names = ("train", "validation", "test")
    for name in names:
        (directory / name).write_text(f"some text to read for {name}")
    config = Config(
        model=Model(
            layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=4,
            relative_buckets=4, relative_max_distance=16,
        ),
        data=Data(**{name: (str(directory / name),) for name in names}),
        training=Training(steps=STEPS[-1], batch_size=1, segment_length=8),
        checkpoint=Checkpoint(keep=9),
        evaluation=Evaluation(batch_size=1),
    )  # fmt: skip
    dataset = preparation.prepare(config.data)
    tokenizer, config = dataset.tokenizer, tasks.from_config(config).resolve(config, dataset)
    workdir = workdirs.create(directory / "workdir")
    workdirs.write_json(workdir.config_json, config_json(config))
    data_manifest.write(workdir, dataset)
    meta = {"config": config_json(config), "tokenizer": tokenizer.fingerprint}
    with CheckpointWriter(workdir.checkpoints, keep=9) as writer:
        for step in STEPS:
            writer.save(step, {"params": random_params(config.model, seed=step)}, meta)
    return workdir


class Followed:
    """A copy of the run without checkpoints, in which a follower waits for checkpoints.

    Attributes:
      said: the messages of the follower.
      events: functions that the follower's calls of `time.sleep` run, one in each call.
    """

    def __init__(self, run: Workdir, path: Path, monkeypatch: pytest.MonkeyPatch):
        self.run, self.workdir = run, workdirs.create(path)
        shutil.copy(run.config_json, self.workdir.config_json)
        shutil.copytree(run.tokenizer, self.workdir.tokenizer, dirs_exist_ok=True)
        self.said: list[str] = []
        self.events: list[Callable[[], object]] = []
        monkeypatch.setattr(following.time, "sleep", lambda seconds: self.events.pop(0)())

    def add(self, *steps: int) -> None:
        for step in steps:
            partial = self.workdir.checkpoints / f"{step}.partial"
            shutil.copytree(self.run.checkpoints / str(step), partial)
            partial.rename(partial.with_suffix(""))

    def remove(self, step: int) -> None:
        shutil.rmtree(self.workdir.checkpoints / str(step))

    def reports(self, ablate: Any = None) -> list[int]:
        """Runs a follower to its end and returns the step of each report."""
        waiter = following.Waiter(1.0, 0.0, self.said.append)
        config = following.wait_for_config(self.workdir.path, waiter)
        follower = following.Follower(self.workdir, config, "test", ablate, self.said.append)
        return [found.report["step"] for found in follower.reports(waiter)]


@pytest.fixture
def followed(run: Workdir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(run, tmp_path / "workdir", monkeypatch)


def test_each_checkpoint_is_evaluated_once_and_the_last_one_ends_it(followed: Followed) -> None:
    partial = followed.workdir.checkpoints / "10.partial"
    followed.events = [partial.mkdir, partial.rmdir, *(lambda s=s: followed.add(s) for s in STEPS)]
    assert followed.reports() == STEPS and not followed.events
    waiting = f"waiting for the next checkpoint in {followed.workdir.checkpoints}"
    assert followed.said == [waiting] * 3, "once for each"
    for step in STEPS:
        report = json.loads((followed.workdir.evaluations / f"{step}/test.json").read_text())
        assert report["step"] == step and report["tokens"] == len("some text to read for test")
    assert followed.reports() == [], "there is nothing left after a restart"
    events = b"".join(
        path.read_bytes() for path in (followed.workdir.tensorboard / "evaluation").iterdir()
    )
    assert events.count(b"eval/test/bits_per_byte") == len(STEPS)
    followed.remove(STEPS[0])
    assert followed.reports("cache") == STEPS[1:], "those had no ablation"
    assert not (followed.workdir.path / ".lock").exists()


def test_checkpoints_that_vanish_or_are_damaged_are_passed_over(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = following.saved_model.load

    def trainer_removes_it(workdir: Workdir, found: Any, config: Config) -> Any:
        if found.step == 10:
            followed.remove(10)
        if found.step == 20:
            followed.remove(30)
            followed.add(40)
        return load(workdir, found, config)

    monkeypatch.setattr(following.saved_model, "load", trainer_removes_it)
    shutil.copytree(followed.run.checkpoints / "20", followed.run.checkpoints / "40")
    try:
        followed.add(*STEPS)
        assert followed.reports() == [20]
    finally:
        shutil.rmtree(followed.run.checkpoints / "40")
    assert followed.said[:2] == [
        "checkpoint 10 was removed while it was read; continuing with the next",
        "checkpoint 30 was removed before it could be evaluated; continuing with the next",
    ]
    assert "checkpoint 40 is damaged: meta.json is of step 20" in followed.said[2]


def test_a_follower_waits_for_a_trainer_but_not_for_ever(
    followed: Followed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = followed.workdir.config_json.read_bytes()
    followed.workdir.config_json.unlink()
    followed.events = [lambda: followed.workdir.config_json.write_bytes(content)]
    followed.add(STEPS[-1])
    assert followed.reports() == STEPS[-1:]
    assert followed.said == [f"waiting for a trainer to start in {followed.workdir.path}"]
    now = [0.0]
    monkeypatch.setattr(following.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(following.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    waiter = following.Waiter(20.0, 1.0, followed.said.append)
    with pytest.raises(CheckpointError, match="waited 1 minutes .*/run, which does not exist yet"):
        following.wait_for_config(tmp_path / "run", waiter)
    assert now == [60]


def test_nothing_is_read_where_no_report_can_be_written(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.add(10)
    followed.workdir.evaluations.rmdir()
    followed.workdir.evaluations.touch()
    monkeypatch.setattr(saved_model, "open_split", lambda *_: pytest.fail("reads"))
    with pytest.raises(ConfigError, match="^cannot write to .*/evaluations: File exists; choose"):
        followed.reports()
    model = saved_model.load(*saved_model.load_config(followed.workdir.path))
    with pytest.raises(ConfigError, match="^cannot write to .*/evaluations: File exists; choose"):
        evaluations.inspect(model, "test", None, print)


def test_a_model_that_predicts_no_numbers_is_an_error(followed: Followed) -> None:
    followed.add(10)
    model = saved_model.load(*saved_model.load_config(followed.workdir.path))
    broken = model._replace(params=jax.tree.map(lambda x: x * jnp.nan, model.params))
    with pytest.raises(
        NonFiniteError, match="^bits_per_byte of test is nan at step 10 of .*another --step$"
    ):
        evaluations.evaluate(broken, "test", None)
    assert not list(followed.workdir.evaluations.iterdir())


@pytest.mark.parametrize("flags", [["--step=3"], ["--poll_seconds=0"], ["--timeout_minutes=-1"]])
def test_flags_that_make_no_sense_are_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --step|must be above 0"):
        evaluate.main(evaluate.parser().parse_args([f"--workdir={tmp_path}", "--follow", *flags]))


ROWS = {"documents": [{"document": "a", "bits": 1.5}, {"document": "b", "bits": 2.5}]}


def test_rows_text_and_last_the_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, replace = [], os.replace

    def recorded(name: str, target: str, **places: int) -> None:
        order.append(target)
        replace(name, target, **places)

    monkeypatch.setattr(os, "replace", recorded)
    result = EvaluationResult({"bits": 2.0}, "2.000 bits", ROWS, "2 documents\nand more")
    found = evaluations.write(Workdir(tmp_path), 7, "test", result)
    assert order == ["test_documents.jsonl", "test.txt", "test.json"]
    directory = tmp_path / "evaluations/7"
    lines = (directory / "test_documents.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == ROWS["documents"]
    assert found.report == {"step": 7, "bits": 2.0}
    assert json.loads((directory / "test.json").read_text("utf-8")) == found.report
    assert found.text == f"{tmp_path}, step 7, test: 2 documents\nand more"
    assert (directory / "test.txt").read_text("utf-8") == found.text + "\n"
    assert found.line == "step 7: test 2.000 bits"
    assert not list(tmp_path.rglob("*.partial"))
    # Another way of reading the split has files of its own.
    evaluations.write(Workdir(tmp_path), 7, "test", result._replace(name="_full"))
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        [*order[:3], "test_full.json", "test_full.txt", "test_full_documents.jsonl"]
    )


def test_figures_are_told_before_they_are_written_and_json_has_no_nan(tmp_path: Path) -> None:
    (tmp_path / "evaluations").touch()
    told: list[str] = []
    result = EvaluationResult({"bits": 2.0, "more": math.nan}, "2", {"rows": [{"a": math.inf}]}, "")
    with pytest.raises(ConfigError, match="^cannot write to .*/evaluations/7: Not a directory"):
        evaluations.write(Workdir(tmp_path), 7, "test", result, lambda e: told.append(e.line))
    assert told == ["step 7: test 2"]
    (tmp_path / "evaluations").unlink()
    evaluations.write(Workdir(tmp_path), 7, "test", result)
    report = json.loads((tmp_path / "evaluations/7/test.json").read_text())
    assert report == {"step": 7, "bits": 2.0, "more": None}
    assert (tmp_path / "evaluations/7/test_rows.jsonl").read_text() == '{"a": null}\n'


def test_a_log_has_a_line_when_one_is_due(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with evaluations.display(5000, "reading test", "tok") as update:
        for seconds in (30, 59, 61, 119, 122):
            now[0] = float(seconds)
            update(1000)
    assert capsys.readouterr().err.splitlines() == [
        "reading test: 3,000 of 5,000 tokens",
        "reading test: 5,000 of 5,000 tokens",
    ]
