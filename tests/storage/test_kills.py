"""Tests runs in buckets whose process is killed, whose requests fail, or whose bucket is slow."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from buckets import BucketServer, Fault, Request
from model_settings import changed
from tiny_runs import environment, metrics, state_hash, tiny_config

import brt
from brt import storage
from brt.checkpointing import manifest, reader
from brt.config import Checkpoint, Config
from brt.config_io import config_text

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
KILLS = 10


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return changed(tiny_config(tmp_path, steps=30), checkpoint=Checkpoint(every=2, keep=2))


def test_a_run_that_is_killed_at_random_requests(
    server: BucketServer, scheme: str, config: Config, tmp_path: Path
) -> None:
    (tmp_path / "run.gin").write_text(config_text(config))
    url, draw = f"{scheme}://bucket/runs/a", random.Random(scheme)
    command = [sys.executable, "-m", "brt.train", f"--gin_file={tmp_path / 'run.gin'}"]
    for life in range(KILLS + 3):
        with subprocess.Popen(
            [*command, f"--workdir={url}"], env=os.environ | environment(tmp_path), text=True,
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            at = len(server.requests) + draw.randrange(1, 60)

            def kill(request: Request, at: int = at, pid: int = process.pid) -> Fault | None:
                if request.number == at:
                    os.kill(pid, signal.SIGKILL)
                    return Fault("reset") if at % 2 else None
                return None

            server.faults = kill if life < KILLS else []
            said = process.communicate()[1]
        assert process.returncode in (0, -9), said
        path = Path(storage.local(url))
        for step in reader.steps(path / "checkpoints"):
            storage.of(path).fetch(path / f"checkpoints/{step}")
            assert manifest.verify(path / f"checkpoints/{step}") == [], said
        storage.discard_all()
        if life >= KILLS and not process.returncode:
            break
    server.faults = []
    path = Path(storage.local(url))
    storage.of(path).fetch(path)
    brt.train(config, tmp_path / "whole")
    assert state_hash(path) == state_hash(tmp_path / "whole")
    assert metrics(path) == metrics(tmp_path / "whole")
    assert reader.steps(path / "checkpoints") == [28, 30]


@pytest.mark.parametrize("kinds", ["reset,503", "half,403"])
def test_requests_that_fail(kinds: str, scheme: str) -> None:
    script = ROOT / "tests/faults/bucket_calls.py"
    command = [sys.executable, str(script), f"--kinds={kinds}", f"--schemes={scheme}", "--every=15"]
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_training_does_not_wait_for_a_slow_bucket(
    server: BucketServer, scheme: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all uploads of logs wait for an answer, the run goes on to its last step."""
    from brt.training.session import Session

    monkeypatch.setattr("brt.storage.mirror._PUBLISH_SECONDS", 0.01)
    monkeypatch.setattr("brt.storage.lease.LEASE_SECONDS", 30.0)
    training = dataclasses.replace(config.training, steps=60)
    config = dataclasses.replace(config, training=training, checkpoint=Checkpoint(every=0))
    draw, waiting, seen = random.Random(0), [], []
    step = Session.step

    def noted(self: Session) -> None:
        step(self)
        seen.append(len(waiting))

    def slow(request: Request) -> Fault | None:
        waiting.append(request.number)
        return Fault(503) if draw.random() < 0.01 else Fault("delay", seconds=0.1)

    monkeypatch.setattr(Session, "step", noted)
    server.faults = slow
    brt.train(config, f"{scheme}://bucket/runs/a")
    begin, end = seen[5], seen[-1]
    assert end - begin < len(seen), "a step waits for a request"
