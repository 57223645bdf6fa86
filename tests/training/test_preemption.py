import signal
import subprocess
import sys
import threading
import time

import pytest

from brt.training.preemption import QUIT_AT_ONCE, StopSignal

# The main thread sleeps in C code, which signals cannot interrupt, as during a compilation.
WAIT = """
import sys, time
from brt.training.preemption import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    begin = time.monotonic()
    while time.monotonic() - begin < float(sys.argv[1]):
        time.sleep(float(sys.argv[1]))
        if stop.requested:
            break
    print("saved after", stop.requested, flush=True)
"""


def start(seconds: float) -> subprocess.Popen:
    """Starts a process that waits for signals for some seconds."""
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
    with start(0.5) as process:
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
