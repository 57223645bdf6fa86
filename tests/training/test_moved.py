"""Tests of run directories that are moved while they train, or that cannot be written."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from model_settings import changed

from brt.config import Checkpoint, Config, Data, Evaluation, Model, Optimizer, Training
from brt.errors import CheckpointError
from brt.training import evaluations, following, loop, saved_model
from brt.training.progress import PhaseTracker
from brt.training.workdir import Workdir


def config(place: Path, **every: int) -> Config:
    """Returns the config of a run of four steps, which evaluates and samples only if told so."""
    text = "The sea was calm and grey while we sat on the deck of an old ship.\n"
    if not (place / "a.txt").exists():
        (place / "a.txt").write_text(text * 40)
    return Config(
        model=Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=16),
        data=Data(train=(str(place / "a.txt"),), cache_dir=str(place / "cache")),
        training=Training(
            steps=4, batch_size=1, segment_length=32, log_every=1,
            **{"evaluate_every": 0, "sample_every": 0, "probe_every": 0, **every},
        ),
        optimizer=Optimizer(name="adamw", learning_rate=1e-3, warmup_steps=1),
        checkpoint=Checkpoint(every=2), evaluation=Evaluation(batch_size=1),
    )  # fmt: skip


def during(phase: str, step: int, act: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Calls `act` when a run enters a phase, in the foreground or in the background, at a step."""
    notify, done = PhaseTracker._notify, []

    def act_once(phases: PhaseTracker) -> None:
        now = phases.now
        if phase in (now.phase, now.background) and now.step >= step and not done:
            done.append(act())
        notify(phases)

    patch.setattr(PhaseTracker, "_notify", act_once)


@pytest.mark.slow_cases("committing-False", "evaluating-*", "sampling-*", "saving-False")
@pytest.mark.parametrize(
    ("phase", "replaced"),
    [
        ("evaluating", False), ("evaluating", True), ("sampling", False), ("saving", False),
        ("committing", False),
    ],
)  # fmt: skip
def test_a_run_that_is_moved_ends_and_writes_nothing_at_the_old_path(
    phase: str, replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    old, new = tmp_path / "runs/old", tmp_path / "new"
    every = {"evaluating": {"evaluate_every": 2}, "sampling": {"sample_every": 2}}
    made = config(tmp_path, **every.get(phase, {}))

    def move() -> None:
        old.rename(new)
        if replaced:
            (old / "checkpoints").mkdir(parents=True)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="moved") as caught:
        during(phase, 2, move, patch)
        loop.train(made, old)
    assert caught.value.exit_code == 4 and str(old) in str(caught.value)
    assert "warning: " not in capsys.readouterr().err, "one sentence is enough"
    heartbeat = {"heartbeat", "heartbeat/0.json"}
    left = {str(path.relative_to(old)) for path in old.rglob("*")} - heartbeat
    assert old.exists() == replaced and left == ({"checkpoints"} if replaced else set())
    if phase == "committing":
        loop.train(made, new)
        assert (new / "checkpoints/4").is_dir()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workdir:
    place = tmp_path_factory.mktemp("trained")
    loop.train(changed(config(place), checkpoint=Checkpoint(every=1)), place / "run")
    return Workdir(place / "run")


@pytest.mark.slow_cases("probe-*", "evaluate-13", "compare-13", "follow-30")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("evaluate", errno.EACCES), ("evaluate", errno.EROFS), ("compare", errno.EACCES),
        ("probe", errno.EACCES), ("follow", errno.EROFS),
    ],
)  # fmt: skip
def test_commands_that_read_a_run_need_no_permission_to_write(
    command: str, code: int, trained: Workdir, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    make = tempfile.TemporaryFile

    def refuse(*args: object, **options: object) -> object:
        if Path(str(options["dir"])).is_relative_to(trained.path):
            raise OSError(code, os.strerror(code))
        return make(*args, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    evaluations._say_once.cache_clear()
    before = {path: path.stat().st_mtime_ns for path in trained.path.rglob("*") if path.is_file()}
    model = saved_model.load(*saved_model.load_config(trained.path))
    if command == "follow":
        follower = following.Follower(trained, model.config, "test", None, print)
        reports = [found.report for found in follower.reports(following.Waiter(1.0, 0.0, print))]
        assert [report["step"] for report in reports] == [2, 3, 4], "each checkpoint once"
        (*_, figures) = reports
    elif command == "probe":
        figures = evaluations.inspect(model, "test", 0, lambda text: None)
    else:
        figures = evaluations.evaluate(
            model, "test", None, other=model if command == "compare" else None
        ).report
    assert figures["step"] == 4
    told = capsys.readouterr().err
    assert told.count("not stored") == 1 and "--json" in told
    after = {path: path.stat().st_mtime_ns for path in trained.path.rglob("*") if path.is_file()}
    assert after == before


def test_a_full_disk_still_ends_an_evaluation(
    trained: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = saved_model.load(*saved_model.load_config(trained.path))
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(CheckpointError, match="make room"):
        evaluations.evaluate(model, "test", None)
