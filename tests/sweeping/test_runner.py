"""Tests that points run in parallel, fail alone, stop together and never run twice."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_decoder import write_decoder

from brt import user_files
from brt.errors import BrtError, ConfigError, Preempted
from brt.sweeping import job, slurm
from brt.sweeping.directory import PointDirectory

from .conftest import ROOT, RUN, Sweeps

GRID = "Sweep.grid = {'Training.seed': (0, 1, 2)}"
PRETRAINED = """
Model.window = 32
Training.init_from = 'decoder'
Training.steps = 5
Training.segment_length = 64
Data.train = 'train.txt'
Data.validation = 'validation.txt'
Data.test = 'test.txt'
Data.cache_dir = 'cache'
"""
ALL = [f"{name} seed={seed}" for seed in range(3) for name in ("train", "evaluate")]


@pytest.fixture(autouse=True)
def _plain_ctrl_c() -> Iterator[None]:
    """Enables Ctrl-C, which shells ignore in background jobs; the tests may be such a job."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


def status(sweeps: Sweeps, seed: int) -> tuple[str, str]:
    """Returns the status of a point and the reason for it."""
    saved = json.loads((sweeps.directory / f"out/seed={seed}/point.json").read_text())["progress"]
    return saved["status"], saved["reason"]


def behave(sweeps: Sweeps, seed: int, script: str) -> None:
    """Writes the script that the commands run for the point with this seed."""
    (sweeps.directory / f"seed={seed}.py").write_text(script)


def when(condition: Callable[[], bool], action: Callable[[], object]) -> None:
    """Starts a thread that calls `action` as soon as the condition holds."""

    def wait() -> None:
        for _ in range(1500):
            if condition():
                action()
                return
            time.sleep(0.02)

    threading.Thread(target=wait).start()


def test_every_point_is_trained_then_evaluated_and_never_again(
    quick: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    quick.write(GRID)
    quick()
    assert quick.starts() == ALL
    said = capsys.readouterr()
    assert "1/3  seed=0  training\n" in said.err and "3/3  seed=2  finished in 0:0" in said.err
    assert said.out.rstrip().endswith("report: out/report.md")
    assert "Training.seed = 1\n" in Path("out/seed=1/point.gin").read_text()
    assert (
        "python -m brt.train --gin_file=out/seed=1/point.gin"
        in Path("out/seed=1/output.txt").read_text()
    )
    quick()
    assert quick.starts() == []
    assert "3 of 3 points are finished already" in capsys.readouterr().err
    quick("--gin_bindings=Sweep.split = 'test'")
    assert quick.starts() == [f"evaluate seed={seed}" for seed in range(3)], "trained already"


def test_points_measured_in_epochs_have_the_steps_of_their_checkpoints(
    quick: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    one = "Sweep.grid = {'Training.seed': (1,)}"
    quick.write(one, RUN.replace("Training.steps = 5", "Training.epochs = 2.0"))
    quick()
    assert "| seed=1 | finished |        2.5000 |" in Path("out/report.md").read_text()
    capsys.readouterr()
    quick()
    assert "1 of 1 points are finished already" in capsys.readouterr().err


def test_a_changed_sweep_does_not_touch_the_old_points(quick: Sweeps) -> None:
    quick.write("Sweep.grid = {'Training.seed': (0,)}")
    quick()
    quick.starts()
    with pytest.raises(
        ConfigError, match="out/seed=0 was made for another sweep: Model.window was"
    ):
        quick("--gin_bindings=Model.window = 4")
    quick.write("Sweep.grid = {'Training.seed': (0, 3)}")
    quick()
    assert quick.starts() == ["train seed=3", "evaluate seed=3"], "points may come and go"


def test_failures_are_told_apart_and_the_others_go_on(
    quick: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    quick.write(GRID)
    behave(quick, 0, "print('brt: error: step 3: the loss is not finite'); sys.exit(5)")
    behave(quick, 1, "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(BrtError, match="2 of 3 points failed: seed=0, seed=1; out/report.md"):
        quick()
    assert quick.starts() == ["train seed=0", "train seed=1", "train seed=2", "evaluate seed=2"]
    assert status(quick, 0) == ("failed", "diverged: step 3: the loss is not finite")
    assert status(quick, 1) == ("failed", "killed, probably out of memory")
    assert "1/3  seed=0  failed: diverged: step 3: the loss" in capsys.readouterr().err
    report = Path("out/report.md").read_text()
    assert "3 points: 2 failed, 1 finished." in report
    assert "- seed=1: killed, probably out of memory (seed=1/output.txt)" in report
    (quick.directory / "seed=0.py").unlink()
    behave(quick, 1, "if name == 'evaluate': raise ValueError('no such thing')")
    with pytest.raises(BrtError, match="1 of 3 points failed: seed=1"):
        quick()
    assert status(quick, 0) == ("finished", "")
    assert status(quick, 1)[1] == "crashed (exit code 1): ValueError: no such thing"


def test_points_run_side_by_side_with_a_share_of_the_cores(
    quick: Sweeps, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.write(GRID)
    monkeypatch.setattr(job, "cores", lambda: 2)
    for seed in range(3):  # Each point waits until all three have begun.
        behave(
            quick, seed,
            "print('threads', os.environ.get('PJRT_NPROC'))\n"
            "while name == 'train' and len(open('starts.txt').readlines()) < 3: time.sleep(0.02)",
        )  # fmt: skip
    quick("--jobs=3")
    assert sorted(quick.starts()[:3]) == [f"train seed={seed}" for seed in range(3)]
    assert "threads 1" in Path("out/seed=2/output.txt").read_text()
    assert "warning: --jobs=3 is more than the 2 cores" in capsys.readouterr().err
    assert "measured side by side with 1 threads each" in Path("out/report.md").read_text()


def test_shares_of_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "cores", lambda: 16)
    assert job.environment({}, 0, 1) == {}
    on_demand = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # The jobs may share a GPU.
    assert job.environment({}, 2, 3) == {"PJRT_NPROC": "5"} | on_demand
    assert job.environment({"CUDA_VISIBLE_DEVICES": "0"}, 1, 2).items() >= on_demand.items()
    base = {"CUDA_VISIBLE_DEVICES": "0,2,3", "PJRT_NPROC": "1"}
    shares = [job.environment(base, slot, 2) for slot in range(2)]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0,3", "2"]
    assert shares[0]["PJRT_NPROC"] == "1", "what the user sets stays"
    assert not shares[0].keys() & on_demand.keys(), "every job has GPUs of its own"
    chosen = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    assert job.environment(chosen, 0, 2).items() >= chosen.items()


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (2, "warning: x\nbrt: error: Model.vocab_size = 3 is too small\n", "config: Model.vocab"),
        (3, "brt: error: a.txt does not exist", "data: a.txt does not exist"),
        (4, "brt: error: the disk is full", "checkpoint: the disk is full"),
        (137, "", "killed, probably out of memory"),
        (1, "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory\n", "out of memory"),
        (-11, "", "ended by SIGSEGV"),
        (1, "", "crashed (exit code 1): it printed nothing"),
        (5, "", "diverged: it printed nothing"),
    ],
)
def test_what_exit_codes_mean(code: int, text: str, reason: str) -> None:
    assert job.explain(code, text).startswith(reason)


SLOW = "time.sleep(0 if pathlib.Path('go_on').exists() else 60)"


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_what_runs_and_the_next_start_goes_on(
    number: signal.Signals, quick: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    quick.write(GRID)
    behave(
        quick,
        1,
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nready = open('up', 'w')\n{SLOW}",
    )
    when(Path("up").exists, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Preempted, match="1 of 3 points are finished; run the same command again"):
        quick()
    assert f"{number.name}: saving at the next step boundary" in capsys.readouterr().err
    assert quick.starts() == ALL[:3]
    assert status(quick, 1) == ("unfinished", "stopped by a signal")
    assert "| seed=1 | unfinished |" in Path("out/report.md").read_text()
    Path("go_on").touch()
    quick()
    assert quick.starts() == ALL[2:]
    assert "seed=1  training continues" in capsys.readouterr().err


@pytest.mark.slow  # The quick test_interruptions.py::test_kills_lose_nothing sends one kill.
def test_a_killed_sweep_leaves_nothing_that_confuses_the_next(
    quick: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    quick.write(GRID)
    behave(quick, 0, "while not pathlib.Path('go_on').exists(): time.sleep(0.02)")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from brt import sweep\n"
        "sweep.main(sweep.parser().parse_args(['--gin_file=sweep.gin', '--workdir=out']))"
    )
    first = subprocess.Popen([sys.executable, "-c", code])
    while not Path("starts.txt").exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    when(lambda: "train seed=2" in Path("starts.txt").read_text(), Path("go_on").touch)
    quick()
    assert (
        quick.starts()
        == [
            "train seed=0",  # The killed sweep started this process, which outlives the sweep.
            *ALL[2:],
            *ALL[:2],  # The second sweep starts these when that process has ended.
        ]
    )
    said = capsys.readouterr().err
    assert said.count("seed=0  is still run by another process") == 1
    assert "seed=0  training continues" in said


def test_the_task_of_an_array_runs_its_point_only(quick: Sweeps) -> None:
    quick.write(GRID)
    quick("--array_index=1")
    assert quick.starts() == ALL[2:4]
    assert "3 points: 2 waiting, 1 finished." in Path("out/report.md").read_text()


def test_documents_are_read_before_anything_runs(quick: Sweeps) -> None:
    message = quick.refusal("Data.validation = 'no.txt'\n" + GRID, error=BrtError)
    assert "bound twice" in message
    message = quick.refusal(GRID, "--gin_bindings=Data.validation = 'no.txt'")
    assert message == "no.txt does not exist"
    assert quick.starts() == []


@pytest.mark.slow  # Quick tests of training show it for one run.
def test_documents_are_prepared_with_the_tokenizer_of_the_weights(
    quick: Sweeps, capsys: pytest.CaptureFixture
) -> None:
    write_decoder(quick.directory / "decoder")
    quick.write(GRID, run=PRETRAINED)
    behave(quick, 2, "if name == 'evaluate': sys.exit(1)")
    with pytest.raises(BrtError, match="1 of 3 points failed"):
        quick()
    pattern = r"prepared \w+: 1 document (\d+) bytes (\d+) tokens"
    sizes = re.findall(pattern, capsys.readouterr().err.replace(",", ""))
    assert len(sizes) == 3 and all(int(tokens) < int(size) for size, tokens in sizes)
    # A point that has started needs the weights no longer.
    shutil.rmtree("decoder")
    behave(quick, 2, "")
    quick()


def _planted(directory: Path) -> None:
    """Puts a file into a directory that is called like a module of Python and must not run."""
    (directory / "calendar.py").write_text("open('ran', 'w').close(); raise SystemExit(7)\n")


def test_points_import_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _planted(tmp_path)
    point = PointDirectory(tmp_path / "point")
    point.path.mkdir()
    with (tmp_path / "lock").open("wb") as lock:
        command = job.start(["calendar", "2026"], point, 0, 1, lock)
    assert command.process.wait() == 0 and "February" in point.output.read_text()
    assert not Path("ran").exists()


def test_tasks_of_slurm_import_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _planted(tmp_path)
    script = slurm.script(1, Path("out"), ["a.gin"], [], "").removesuffix(slurm.BODY)
    text = f'{script}"$PYTHON" -m calendar 2026\n'
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True)
    assert done.returncode == 0 and "February" in done.stdout and not Path("ran").exists()


def test_a_checkout_that_is_not_installed_runs_its_own_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the current directory says where brt is if it is not installed."""
    monkeypatch.chdir(ROOT)
    program = [*user_files.python(), "brt", "--help"]
    bare = [program[0], "-S", *program[1:]]
    done = subprocess.run(bare, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert "No module named brt" not in done.stderr
