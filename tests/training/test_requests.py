"""Tests requests that are made by files in a run directory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from brt.training import requests
from brt.training.preemption import StopSignal
from brt.training.progress import PhaseTracker
from brt.training.requests import Requests
from brt.training.workdir import Workdir


class Asked:
    """The requests of a run in a directory, and the messages about them."""

    def __init__(self, place: Path, stack: contextlib.ExitStack, evaluates: bool = True):
        self.place, self.said, self.phases = place, [], PhaseTracker()
        signal = StopSignal()
        self.requests = Requests(
            signal, Workdir(place), self.phases, evaluates, self.said.append, stack
        )

    def touch(self, name: str) -> None:
        (self.place / name).touch()

    def left(self) -> list[str]:
        return sorted(path.name for path in self.place.iterdir())


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[contextlib.ExitStack]:
    """Lets requests be looked for at every call, and closes what a test enters on the stack."""
    monkeypatch.setattr(requests, "_LOOK_SECONDS", 0.0)
    with contextlib.ExitStack() as opened:
        yield opened


def test_a_save_is_owed_until_it_is_done(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    run = Asked(tmp_path, stack)
    assert not run.requests.checkpoint()
    run.touch("checkpoint_now")
    assert run.requests.checkpoint() and run.requests.checkpoint()
    run.requests.checkpoint_done(7)
    assert run.said == ["checkpoint_now: step 7 is saved"]
    assert not run.requests.checkpoint() and run.left() == []
    run.touch("checkpoint_now")
    assert run.requests.checkpoint(), "again"


def test_the_next_evaluation_is_the_last(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    run = Asked(tmp_path, stack)
    assert not run.requests.stop_after_evaluation()
    run.touch("stop_after_evaluation")
    assert not run.requests.checkpoint() and not run.requests.checkpoint()
    assert run.said == ["stop_after_evaluation: the run stops after the next evaluation"], "once"
    assert run.requests.stop_after_evaluation() and run.left() == ["stop_after_evaluation"]
    run.requests.stop_after_evaluation_done(8)
    assert run.said[1:] == ["stop_after_evaluation: step 8 is evaluated and saved"]
    assert run.left() == [] and not run.requests.stop_after_evaluation()


def test_who_never_evaluates_says_so(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    run = Asked(tmp_path, stack, evaluates=False)
    run.touch("stop_after_evaluation")
    run.requests.checkpoint()
    assert "makes no evaluations" in run.said[0] and "SIGTERM" in run.said[0]


def test_files_are_looked_for_once_in_a_while(
    tmp_path: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_LOOK_SECONDS", 1000.0)
    run = Asked(tmp_path, stack)
    run.touch("checkpoint_now")
    assert run.requests.checkpoint() and not run.requests.checkpoint()


def test_to_look_is_to_be_alive(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    run = Asked(tmp_path, stack)
    before = run.phases.now.last_progress
    assert run.requests.stop() is None
    assert run.phases.now.last_progress > before
