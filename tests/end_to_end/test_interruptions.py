"""Tests that a run which is stopped, killed or damaged and then resumed ends with the same state
as a run without interruptions.
"""

import random
import signal
from pathlib import Path

import pytest
from tiny_runs import flip, metrics, state_hash

from brt import train
from brt.checkpointing import manifest, reader
from brt.data import preparation
from brt.errors import Preempted

from .conftest import STEPS_PER_EPOCH, Commands

COMPILING = "brt.training.run.compiled_step"
STEP = "brt.training.run.put"
EVALUATING = "brt.tasks.language_modeling.evaluation.evaluation_batches"
CLOSING = "brt.checkpointing.writer.verify"
# Settings of which a resumed run needs more than the parameters: random numbers and microbatches.
HARDER = "Model.dropout = 0.1", "Training.gradient_accumulation = 2"
SAVING = "brt.checkpointing.manifest.write"


def at(place: str, call: int, action: str) -> str:
    """Returns the code of a hook that acts at one call of the function; see conftest.py."""
    return f"hook({place!r}, {call}, {action})"


@pytest.mark.slow
def test_signals_a_full_disk_and_a_damaged_checkpoint_change_nothing(
    commands: Commands, tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    commands.train(whole, *HARDER)

    def train(hook: str = "", code: int = 0) -> str:
        return commands.train(run, *HARDER, hook=hook, code=code).err

    def saved() -> list[int]:
        return reader.steps(run / "checkpoints")

    terminate, interrupt = "send(signal.SIGTERM)", "send(signal.SIGINT)"
    said = train(at(COMPILING, 1, terminate), code=75)
    assert "SIGTERM: saving at the next step boundary, after compiling (Ctrl-C quits at" in said
    assert "brt: saved at step 0; run the same command again to go on" in said
    said = train(at(STEP, 3, terminate), code=75)
    assert "from step 0" in said and "saved at step 3;" in said, "in the middle of an interval"
    said = train(at(EVALUATING, 1, interrupt), code=75)
    assert "from step 3" in said and "saved at step 12;" in said
    assert "12/24  validation" not in said, "half an evaluation counts for nothing"
    said = train(at(STEP, STEPS_PER_EPOCH - 12, interrupt), code=75)
    assert "step 12/24  validation" in said, "the next run makes up for it"
    assert "saved at step 16;" in said, "at the border of an epoch"
    assert saved() == [8, 12, 16]
    said = train(at(SAVING, 1, "disk_full"), code=4)
    assert "brt: error: saving step 20" in said and "the disk is full" in said
    assert saved() == [8, 12, 16]
    files = (run / "checkpoints/16").rglob("*")
    flip(max(files, key=lambda path: path.stat().st_size * path.is_file()))  # It has parameters.
    said = train(at(STEP, 11, terminate), code=75)
    assert "checkpoint 16 is damaged" in said and "trying the next older one" in said
    assert "from step 12" in said and "saved at step 23;" in said
    said = train(at(EVALUATING, 1, terminate), code=75)
    assert "saved at step 24, not evaluated" in said
    assert "step 24 of 24 is done already" in train()
    assert state_hash(run) == state_hash(whole)
    assert metrics(run) == metrics(whole)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)]
)
def test_before_training_a_signal_stops_at_once(
    number: signal.Signals,
    error: type[BaseException],
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        preparation.DocumentPreparation, "open", lambda *_, **__: signal.raise_signal(number)
    )
    flags = [f"--gin_file={commands.config}", f"--workdir={tmp_path}/run"]
    # A shell starts background jobs with Ctrl-C ignored, and the tests may be such a job.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error):
            train.main(train.parser().parse_args(flags))
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert not (tmp_path / "run").exists()


def kill_and_restart(
    commands: Commands, workdir: Path, kills: int, seconds: float, *bindings: str
) -> None:
    """Kills a run several times at random moments, then resumes it and lets it finish.

    The killed runs save every step; the last run saves as the config says.
    """
    for _ in range(kills):
        delay = random.uniform(0, seconds)
        kill = f"lambda: threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGKILL)).start()"
        commands.train(workdir, "Checkpoint.every = 1", *bindings, hook=at(STEP, 1, kill), code=-9)
        for step in reader.steps(workdir / "checkpoints"):
            assert manifest.verify(workdir / f"checkpoints/{step}") == [], f"killed at {delay} s"
    done = commands.train(workdir, *bindings, hook=at(CLOSING, 1, "send(signal.SIGTERM)"))
    assert "SIGTERM" in done.err, "it came, but too late to stop anything"
    left = {path.name for path in (workdir / "checkpoints").iterdir()}
    assert left == set(map(str, reader.steps(workdir / "checkpoints"))), "no litter"


@pytest.mark.slow
def test_many_kills_lose_nothing(commands: Commands, tmp_path: Path) -> None:
    longer = "Training.steps = 200", *HARDER
    commands.train(tmp_path / "whole", *longer)
    kill_and_restart(commands, tmp_path / "killed", 8, 6.0, *longer)
    assert state_hash(tmp_path / "killed") == state_hash(tmp_path / "whole")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    commands.train(tmp_path / "other", *longer, "Training.seed = 1")
    assert state_hash(tmp_path / "other") != state_hash(tmp_path / "whole")
