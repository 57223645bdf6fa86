"""Tests runs in buckets with the real commands: they are what local runs are."""

import contextlib
import dataclasses
import importlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from buckets import BucketServer, Fault, Request
from model_settings import changed
from tiny_runs import environment, metrics, state_hash, tiny_config

import brt
from brt import storage
from brt.config import Checkpoint, Config
from brt.config_io import config_text
from brt.errors import Preempted
from brt.training import requests
from brt.training.session import Session

pytestmark = pytest.mark.slow_cases("s3*")
STOP, SAVE = requests.STOP, requests.CHECKPOINT


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    made = tiny_config(tmp_path_factory.mktemp("texts"), steps=8, evaluate_every=4)
    return changed(made, checkpoint=Checkpoint(every=2, keep=2))


@pytest.fixture(scope="module")
def whole(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed local run."""
    path = tmp_path_factory.mktemp("whole") / "a"
    brt.train(config, path)
    return path


def copied(url: str) -> Path:
    """Returns a copy that was made after all others were deleted."""
    storage.discard_all()
    path = Path(storage.local(url))
    storage.of(path).fetch(path)
    return path


def files(run: Path) -> set[str]:
    """Returns the names of the files of a run, except those that are random or local."""
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    names = {re.sub(r"(state|tensorboard|evaluations)/.*", r"\1", name) for name in found}
    return {name for name in names if not re.match(r"heartbeat|\.lock", name)}


def wait(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def said(url: str | Path, *arguments: str) -> str:
    """Returns what a command prints, without what depends on the place and the time."""
    module = importlib.import_module(f"brt.{arguments[0]}")
    shown = io.StringIO()
    words = [word.replace("RUN", str(url)) for word in arguments[1:]]
    with contextlib.redirect_stdout(shown):
        module.main(module.parser().parse_args(words))
    storage.publish_all()
    text = re.sub(r"[0-9.,]+ (tokens per second|seconds|s\b)|\d+:\d\d", "", shown.getvalue())
    return text.replace(str(url), "RUN")


@pytest.mark.slow  # It runs all commands twice; the tests of mirrors compare files.
def test_a_run_in_a_bucket_is_the_run(
    server: BucketServer, scheme: str, config: Config, whole: Path, tmp_path: Path
) -> None:
    url = f"{scheme}://bucket/runs/a"
    server.put("bucket", f"runs/a/{STOP}", b"")
    with pytest.raises(Preempted):
        brt.train(config, url)
    objects = server.buckets["bucket"]
    assert f"runs/a/{STOP}" not in objects, "the next start stops again"
    assert objects["runs/a/.lock"].content == b""
    assert b"validation" in objects["runs/a/log.txt"].content
    storage.discard_all()
    assert brt.train(config, url).step == 8
    path = copied(url)
    assert state_hash(path) == state_hash(whole)
    assert metrics(path) == metrics(whole)
    assert files(path) == files(whole)

    storage.discard_all()
    for command in (
        ("inspect", "--workdir=RUN", "--state_hash"),
        ("evaluate", "--workdir=RUN", "--split=test"),
        ("generate", "--workdir=RUN", "--prompt=ab", "--max_tokens=4"),
    ):
        assert said(url, *command) == said(whole, *command)
        storage.discard_all()
    assert "runs/a/evaluations/8/test.json" in objects
    model = brt.load(url)
    assert model.step == 8
    said(url, "convert", "--from=brt", "RUN", "--to=hf", str(tmp_path / "local"))
    said(url, "convert", "--from=brt", "RUN", "--to=hf", f"{scheme}://bucket/exported")
    for file in (tmp_path / "local").iterdir():
        assert objects[f"exported/{file.name}"].content == file.read_bytes(), file.name


def test_follow(server: BucketServer, config: Config, whole: Path) -> None:
    """The follower is started before the run, which a thread of the server's copies step by step.

    Its reports are in the bucket while it still waits.
    """
    files = sorted(p for p in whole.rglob("*") if p.is_file() and "evaluations" not in p.parts)
    files = [p for p in files if p.name[0] != "."]
    early = [p for p in files if "checkpoints" not in p.parts]
    waves = [early, *([p for p in files if str(n) in p.parts] for n in (6, 8))]
    reports = [f"runs/a/evaluations/{step}/test.json" for step in (6, 8)]
    seen: list[set[str]] = []

    def appear(request: Request) -> None:
        last = len(waves) > 1 or reports[0] in server.buckets["bucket"]
        if request.operation == "list" and waves and last and server.count("list") > 2:
            seen.append({*server.buckets["bucket"]})
            for path in waves.pop(0):
                server.put("bucket", f"runs/a/{path.relative_to(whole)}", path.read_bytes())

    server.faults = appear
    flags = "--split=test", "--follow", "--poll_seconds=0.01", "--timeout_minutes=1"
    said("gs://bucket/runs/a", "evaluate", "--workdir=RUN", *flags)
    assert reports[0] in seen[-1]
    assert {*reports} <= {*server.buckets["bucket"]}


@pytest.mark.slow
def test_a_checkpoint_that_somebody_requests(
    server: BucketServer, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brt.storage.mirror._PUBLISH_SECONDS", 0.02)
    monkeypatch.setattr(requests, "_LOOK_SECONDS", 0.0)
    step = Session.step

    def slowly(self: Session) -> None:
        if self.completed == 2:
            server.put("bucket", f"runs/a/{SAVE}", b"")
            wait(lambda: (self.workdir.path / SAVE).exists())
        if self.completed == 5:
            wait(lambda: f"runs/a/{SAVE}" not in server.buckets["bucket"])
            assert "runs/a/checkpoints/3/MANIFEST.sha256" in server.buckets["bucket"]
        step(self)

    monkeypatch.setattr(Session, "step", slowly)
    brt.train(dataclasses.replace(config, checkpoint=Checkpoint(every=0)), "gs://bucket/runs/a")


@pytest.mark.slow
def test_a_sweep(
    server: BucketServer, scheme: str, config: Config, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gin = tmp_path / "sweep.gin"
    gin.write_text(config_text(config) + "\nSweep.grid = {'Training.seed': [0, 1]}\n")
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    url = f"{scheme}://bucket/sweeps/a"
    command = "sweep", f"--gin_file={gin}", "--workdir=RUN"
    table = said(url, *command)
    objects = server.buckets["bucket"]
    for point in ("seed=0", "seed=1"):
        names = [name for name in objects if f"/{point}/" in name]
        assert f"sweeps/a/{point}/evaluations/8/validation.json" in names, names
        assert objects[f"sweeps/a/{point}/.lock"].content == b""
    assert "sweeps/a/report.md" in objects
    local = said(tmp_path / "sweep", *command)
    assert re.sub(r"[0-9.]+k?", "", table) == re.sub(r"[0-9.]+k?", "", local)
    storage.discard_all()
    writes = server.count("write", "*/checkpoints/*")
    said(url, *command)
    assert server.count("write", "*/checkpoints/*") == writes, "a finished point is trained again"


@pytest.mark.slow
def test_a_sweep_that_is_killed_waits_for_the_trainer_that_it_has_left(
    server: BucketServer, scheme: str, config: Config, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    gin = tmp_path / "sweep.gin"
    gin.write_text(config_text(config) + "\nSweep.grid = {'Training.seed': [0, 1]}\n")
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    # The trainer saves only when the next sweep has found that it is there.
    slow = Fault("delay", "write", "*/seed=0/checkpoints/2/*", times=99, seconds=8)
    server.faults = [slow]
    flags = [f"--gin_file={gin}", f"--workdir={scheme}://bucket/sweeps/a"]
    with subprocess.Popen([sys.executable, "-m", "brt.sweep", *flags]) as process:
        wait(lambda: slow.times < 99)
        process.kill()
    table = said(f"{scheme}://bucket/sweeps/a", "sweep", *flags)
    assert "seed=0  is still run by another process" in capsys.readouterr().err
    local = said(tmp_path / "sweep", "sweep", flags[0], "--workdir=RUN")
    assert re.sub(r"[0-9.]+k?", "", table) == re.sub(r"[0-9.]+k?", "", local)
    server.copy("bucket", "sweeps/a", tmp_path / "copy")
    for point in ("seed=0", "seed=1"):
        found, wanted = tmp_path / "copy" / point, tmp_path / "sweep" / point
        assert state_hash(found) == state_hash(wanted)
        assert metrics(found) == metrics(wanted)


@pytest.mark.slow
def test_sigterm_saves_publishes_and_frees_the_lock(
    server: BucketServer, scheme: str, config: Config, tmp_path: Path
) -> None:
    training = dataclasses.replace(config.training, steps=100_000, evaluate_every=0)
    config = dataclasses.replace(config, training=training)
    gin = tmp_path / "run.gin"
    gin.write_text(config_text(config))
    command = [sys.executable, "-m", "brt.train", f"--gin_file={gin}",
               f"--workdir={scheme}://bucket/runs/a"]  # fmt: skip
    with subprocess.Popen(
        command, env=os.environ | environment(tmp_path), text=True, stderr=subprocess.PIPE
    ) as process:
        while not server.count("write", "*/MANIFEST.sha256"):
            time.sleep(0.1)
            assert process.poll() is None, process.stderr and process.stderr.read()
        process.terminate()
        text = process.communicate()[1]
    assert process.returncode == 75, text
    assert "Traceback" not in text
    step = int(re.findall(r"saved at step (\d+)", text)[-1])
    objects = server.buckets["bucket"]
    assert f"runs/a/checkpoints/{step}/MANIFEST.sha256" in objects
    assert objects["runs/a/last_checkpoint.txt"].content == f"{step}\n".encode()
    assert objects["runs/a/.lock"].content == b""
    assert f'"step": {step}' in objects["runs/a/metrics.jsonl"].content.decode()
