"""Tests requests that are made by files in a run directory."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brt.training import requests
from brt.training.preemption import StopSignal
from brt.training.progress import PhaseTracker
from brt.training.requests import Requests
from brt.training.workdir import Workdir


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Requests]]:
    """Returns a function that makes the requests of a run, whose messages are in `SAID`."""
    monkeypatch.setattr(requests, "_LOOK_SECONDS", 0.0)
    SAID.clear()
    with contextlib.ExitStack() as stack:
        yield lambda evaluates=True: Requests(
            StopSignal(), Workdir(tmp_path), PHASES, evaluates, SAID.append, stack
        )


SAID: list[str] = []
PHASES = PhaseTracker()


def test_a_save_is_owed_until_it_is_done(ask: Callable, tmp_path: Path) -> None:
    run, file = ask(), tmp_path / "checkpoint_now"
    assert not run.checkpoint()
    file.touch()
    assert run.checkpoint() and run.checkpoint()
    run.checkpoint_done(7)
    assert SAID == ["checkpoint_now: step 7 is saved"]
    assert not run.checkpoint() and not file.exists()
    file.touch()
    assert run.checkpoint(), "again"


def test_the_next_evaluation_is_the_last(ask: Callable, tmp_path: Path) -> None:
    run, file = ask(), tmp_path / "stop_after_evaluation"
    assert not run.stop_after_evaluation()
    file.touch()
    assert not run.checkpoint() and not run.checkpoint()
    assert SAID == ["stop_after_evaluation: the run stops after the next evaluation"], "once"
    assert run.stop_after_evaluation() and file.exists()
    run.stop_after_evaluation_done(8)
    assert SAID[1:] == ["stop_after_evaluation: step 8 is evaluated and saved"]
    assert not file.exists() and not run.stop_after_evaluation()
    file.touch()
    ask(evaluates=False).checkpoint()
    assert "makes no evaluations" in SAID[2] and "SIGTERM" in SAID[2]


def test_files_are_looked_for_once_in_a_while_which_is_a_sign_of_life(
    ask: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_LOOK_SECONDS", 1000.0)
    run, before = ask(), PHASES.now.last_progress
    (tmp_path / "checkpoint_now").touch()
    assert run.checkpoint() and not run.checkpoint()
    assert run.stop() is None
    assert PHASES.now.last_progress > before
