"""Tests the progress that a run shows on every kind of terminal, and the phases it reports."""

import contextlib
import errno
import fcntl
import io
import os
import re
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from brt import durable
from brt.formatting import clock, counted, short
from brt.training.progress import PhaseTracker, Progress, RunStatus, until_first_step


def figures(progress: Progress, step: int) -> None:
    progress.report(step, bits_per_token=3.2149, tokens_per_second=41234.0, seconds_left=80.2)


def test_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress(900, log=tmp_path / "log.txt", stream=stream) as progress:
        progress.phase(RunStatus("compiling", 0, 0.0))
        assert stream.getvalue() == "compiling ...\n", "said before, not after"
        progress.phase(RunStatus("stepping", 0, 0.0))
        for step in (99, 100):
            progress.step(step)
        progress.report_first_step(99, 7.91)
        figures(progress, 100)
        progress.phase(RunStatus("evaluating", 100, 0.0))
        progress.evaluation(100, "validation 2.346 bits/byte")
        progress.phase(RunStatus("stepping", 100, 0.0))
    shown = stream.getvalue().splitlines()
    assert re.fullmatch(r"compiling: \d+\.\d s", shown[1])
    assert shown[2:] == [
        "step 99/900  train 7.91 bits/token",
        "step 100/900  train 3.21 bits/token  41.2k tokens/s  ETA 1:20",
        "step 100/900  evaluating ...",
        "step 100/900  validation 2.346 bits/byte",
    ]
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[21:] for line in logged] == shown
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in logged)


def test_a_bar_on_a_terminal_with_lines_above_it(tmp_path: Path) -> None:
    stream, log = io.StringIO(), tmp_path / "log.txt"
    with Progress(900, initial_step=50, log=log, stream=stream, bar=True) as progress:
        progress.step(99)
        figures(progress, 100)
        progress.evaluation(100, "validation 2.346 bits/byte")
        progress.message("saved")
        progress.phase(RunStatus("evaluating", 100, 0.0))
        assert "bits/byte  evaluating ..." in stream.getvalue().split("\r")[-1]
        progress.phase(RunStatus("stepping", 100, 0.0))
        assert "evaluating" not in stream.getvalue().split("\r")[-1]
    shown = stream.getvalue()
    assert "50/900" in shown and "100/900" in shown
    assert "train 3.21 bits/token  41.2k tokens/s  ETA 1:20  validation 2.346 bits/byte" in shown
    assert "saved\n" in shown
    assert "step 100/900  train 3.21" in log.read_text()
    assert [line[21:] for line in log.read_text().splitlines()[-2:]] == [
        "saved", "step 100/900  evaluating ...",
    ]  # fmt: skip


def test_the_log_continues_after_a_restart(tmp_path: Path) -> None:
    for text in ("one", "two\nthree"):
        with Progress(9, log=tmp_path / "log.txt", stream=io.StringIO()) as progress:
            progress.note(text)
    assert [line[21:] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "one", "two", "three",
    ]  # fmt: skip


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress(9, log=tmp_path, stream=stream) as progress:
        progress.message("on")
    assert stream.getvalue() == f"warning: {tmp_path} cannot be written: Is a directory\non\n"
    stream = io.StringIO()
    with Progress(9, log=tmp_path / "log.txt", stream=stream) as progress:
        assert progress._log
        with open("/dev/full", "w") as full:
            os.dup2(full.fileno(), progress._log.fileno())
        progress.message("on")
        progress.message("and on")
    assert stream.getvalue() == (
        "on\nwarning: log.txt cannot be written: No space left on device\nand on\n"
    )


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_the_log_ends_the_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "log.txt"))

    monkeypatch.setattr(durable, "open_file", refuse)
    with pytest.raises(OSError, match="log.txt"):
        Progress(9, log=tmp_path / "log.txt", stream=io.StringIO())


def test_numbers_and_times_for_people() -> None:
    assert [short(n) for n in (7.4, 950, 41234, 3.14e6, 2e9)] == [
        "7", "950", "41.2k", "3.1M", "2.0G",
    ]  # fmt: skip
    assert [clock(s) for s in (0, 59.6, 80, 7509)] == ["0:00", "1:00", "1:20", "2:05:09"]
    assert (counted(1, "lane"), counted(1200, "row")) == ("1 lane", "1,200 rows")


def test_a_phase_with_an_end_gives_way_to_the_one_before() -> None:
    ticks = map(float, range(100)).__next__
    phases, heard = PhaseTracker(ticks), []
    phases.listen(heard.append)
    phases.enter("stepping", 3)
    phases.progressed(4)
    with phases.during("evaluating"):
        assert phases.now == RunStatus("evaluating", 4, 3)
        phases.progressed()
        assert phases.now == RunStatus("evaluating", 4, 4)
    assert [(now.phase, now.step) for now in heard] == [
        ("stepping", 3), ("evaluating", 4), ("stepping", 4),
    ]  # fmt: skip
    with phases.in_background("committing"):
        phases.enter("ending")
    assert [(now.phase, now.background) for now in heard[3:]] == [
        ("stepping", "committing"), ("ending", "committing"), ("ending", ""),
    ]  # fmt: skip

    for phase, waits in (("compiling", "compiling"), ("stepping", ""), ("evaluating", "")):
        phases.enter(phase)
        assert phases.uninterruptible == waits, "so a request to stop waits for its end"
    with pytest.raises(KeyError), phases.during("restoring"):
        raise KeyError
    assert phases.now.phase == "restoring", "what fails stays in its phase"


def test_the_times_until_the_first_step_add_up() -> None:
    now = 6.14
    phases = PhaseTracker(lambda: now, began=0.0)

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    takes(0.4)
    with phases.counting("data"):
        takes(4.0)
    for phase, seconds in (("restoring", 12.0), ("seeking", 0.01), ("compiling", 15.2)):
        with phases.during(phase):
            takes(seconds)
        takes(0.1)
    phases.enter("stepping", 3)
    takes(3.1)
    assert until_first_step(phases.seconds()) == (
        "first step 41.1 s after the start: imports and settings 6.1 s, data 4.0 s, "
        "restoring 12.0 s, compiling 15.2 s, first step 3.1 s, other 0.7 s"
    )
    assert until_first_step(PhaseTracker(lambda: now).seconds()).endswith("start: 0.0 s")


@pytest.fixture
def shown_on(tmp_path: Path) -> Callable[[int], str]:
    """Returns a function from a terminal's width to the output about the first step there."""

    def show(columns: int) -> str:
        try:
            ours, theirs = os.openpty()
        except OSError as error:
            pytest.skip(f"this machine has no pseudo-terminals ({error})")
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with (
            open(theirs, "w", encoding="utf-8") as stream,
            Progress(900, log=tmp_path / "log.txt", stream=stream) as progress,
        ):
            progress.step(1)
            progress.report_first_step(1, 7.91)
        return read_all(ours)

    return show


def read_all(terminal: int) -> str:
    """Returns everything that was written to a pseudo-terminal whose other side is closed.

    The kernel may deliver the text in several parts.
    """
    parts = []
    with open(terminal, "rb", buffering=0) as file, contextlib.suppress(OSError):
        # Linux reports the end as an error.
        while part := file.read(100_000):
            parts.append(part)
    return b"".join(parts).decode()


def test_a_terminal_has_a_bar_and_one_of_unknown_width_has_lines(
    shown_on: Callable[[int], str],
) -> None:
    text = shown_on(100)
    assert "1/900" in text and "train 7.91 bits/token" in text and "\r" in text
    assert shown_on(0).split("\r\n")[0] == "step 1/900  train 7.91 bits/token"
