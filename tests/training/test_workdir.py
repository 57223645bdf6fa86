import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from brt import durable
from brt.errors import CheckpointError, ConfigError
from brt.training import workdir

HOLD = """
import sys, time
from pathlib import Path
from brt.training import workdir
with workdir.lock(workdir.create(Path(sys.argv[1])), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen:
    """Starts a process that holds the lock of a run directory until its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_directory_has_the_documented_layout(tmp_path: Path) -> None:
    run = workdir.create(tmp_path / "runs/a")
    assert run == workdir.create(tmp_path / "runs/a"), "again, for a resumed run"
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints", "evaluations", "plots", "samples", "tensorboard", "tokenizer",
    ]  # fmt: skip
    assert run.metrics == tmp_path / "runs/a/metrics.jsonl"


def test_a_second_trainer_is_refused_and_a_killed_one_frees_the_workdir(tmp_path: Path) -> None:
    run = workdir.create(tmp_path)
    messages: list[str] = []
    with hold(tmp_path) as process:
        with pytest.raises(
            ConfigError,
            match=rf"is in use by another trainer \(process {process.pid} on \S+, started "
            r"\d{4}-\d\d-\d\dT\S+\); wait for it, stop it, or choose another --workdir",
        ):
            with workdir.lock(run, messages.append):
                pass
        assert messages == []
        process.send_signal(signal.SIGKILL)
        process.wait()
    for _ in range(2):  # The second time, nobody was killed.
        with workdir.lock(run, messages.append):
            assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
    assert len(messages) == 1
    assert f"that was killed (process {process.pid} on " in messages[0]
    assert "another host" not in messages[0]


def test_what_a_killed_trainer_was_writing_goes(tmp_path: Path) -> None:
    run = workdir.create(tmp_path)
    name = f".brt.{16 * '0'}.partial"
    ours = [run.path / name, run.samples / name]
    (run.evaluations / "8").mkdir()
    ours += [run.evaluations / "8" / name]
    others = [run.path / "notes.partial", run.path / ".brt.mine.partial"]
    for path in (*ours, *others):
        path.touch()
    with workdir.lock(run, print):
        assert not any(path.exists() for path in ours)
        assert all(path.exists() for path in others)


def test_permission_that_is_withdrawn_while_training_is_a_failure_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = []

    class Lock(io.FileIO):
        def truncate(self, size: int | None = None) -> int:
            if denied:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return super().truncate(size)

    monkeypatch.setattr(durable, "open_file", lambda path, mode, buffering: Lock(path, "a+"))
    with (
        pytest.raises(CheckpointError, match="cannot write to .*lock: .*; permit it again"),
        workdir.lock(workdir.create(tmp_path), print),
    ):
        denied.append(True)


def test_a_lock_left_on_another_host_is_taken_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 7 on elsewhere, started 2020-01-01T00:00:00+00:00")
    messages: list[str] = []
    with workdir.lock(workdir.create(tmp_path), messages.append):
        pass
    assert "it ran on another host, so make sure that it has ended" in messages[0]


def test_a_workdir_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match=r"^cannot write to .*/file/run: Not a directory; choose another --workdir",
    ):
        workdir.create(tmp_path / "file/run")
    with pytest.raises(ConfigError, match=r"^cannot write to /proc/brt: No such file or directory"):
        workdir.create(Path("/proc/brt"))
    with pytest.raises(ConfigError, match=r"^cannot write to /proc/self: "):
        with workdir.lock(workdir.Workdir(Path("/proc/self")), print):
            pass


def test_provenance_says_what_runs_where() -> None:
    content = json.loads(json.dumps(workdir.describe_process()))
    assert content["versions"]["jax"] == jax.__version__
    assert set(content["versions"]) >= {"brt", "jaxlib", "flax", "optax", "orbax-checkpoint"}
    assert len(content["devices"]) == jax.device_count()
    assert content["command"] == sys.argv
    assert content["cpus"] >= 1


def test_commit_and_changes_of_a_checkout(tmp_path: Path) -> None:
    assert workdir._git(tmp_path) is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(
        ["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", "x"],
        check=True,
    )
    clean = workdir._git(tmp_path)
    assert len(clean["commit"]) == 40 and not clean["dirty"]
    (tmp_path / "new").touch()
    assert workdir._git(tmp_path) == {**clean, "dirty": True}


def test_text_and_json_are_replaced_whole(tmp_path: Path) -> None:
    workdir.write_text(tmp_path / "config.gin", "Ünï")
    workdir.write_json(tmp_path / "config.json", {"a": [1]})
    workdir.write_json(tmp_path / "config.json", {"a": 2})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.gin", "config.json"]
    with pytest.raises(ConfigError, match="cannot write to .*gone/x: No such file"):
        workdir.write_text(tmp_path / "gone/x", "")
