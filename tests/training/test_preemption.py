"""Tests requests to a run: signals, and files in its directory."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brt.training import requests
from brt.training.preemption import QUIT_AT_ONCE, StopSignal
from brt.training.progress import PhaseTracker
from brt.training.requests import Requests
from brt.training.workdir import Workdir

# The main thread sleeps in C code, which signals cannot interrupt, as during a compilation.
WAIT = """
import sys, time
from brt.training.preemption import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    time.sleep(float(sys.argv[1]))
    while not stop.requested:
        time.sleep(float(sys.argv[1]))
    print("saved after", stop.requested, flush=True)
"""


def start(seconds: float) -> subprocess.Popen:
    """Starts a process that looks every so many seconds whether it was asked to stop."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_says_so_at_once(number: signal.Signals) -> None:
    with start(0.2) as process:
        process.send_signal(number)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline() == (
            f"{number.name}: saving at the next step boundary (Ctrl-C quits at once)\n"
        )
        assert process.wait() == 0
        assert process.stdout.read() == f"saved after {number.name}\n"


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_later_ctrl_c_quits_even_in_code_that_python_cannot_interrupt(
    first: signal.Signals,
) -> None:
    with start(60) as process:
        begin = time.monotonic()
        process.send_signal(first)
        process.stderr.readline(), process.stderr.readline()
        process.send_signal(signal.SIGTERM)  # Schedulers may send a signal several times.
        process.send_signal(signal.SIGINT)
        assert process.wait() == QUIT_AT_ONCE
        assert time.monotonic() - begin < 5
        assert process.stdout.read() == ""
        assert "SIGINT: quitting without saving" in process.stderr.read()


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert stop.requested is None
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_other_threads_change_nothing() -> None:
    seen = []

    def run() -> None:
        with StopSignal() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(None, signal.getsignal(signal.SIGTERM))]


@pytest.mark.parametrize(("phase", "after"), [("", ""), ("compiling", ", after compiling")])
def test_the_message_names_the_phase_that_it_waits_for(phase: str, after: str) -> None:
    messages: list[str] = []
    with StopSignal(messages.append, uninterruptible=lambda: phase) as stop:
        signal.raise_signal(signal.SIGTERM)
        while not messages:
            time.sleep(0.01)
        assert stop.requested == "SIGTERM"
    assert messages == [f"SIGTERM: saving at the next step boundary{after} (Ctrl-C quits at once)"]


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
