"""Tests that every kind of terminal shows progress from the first step on."""

import contextlib
import fcntl
import io
import os
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from brt.training.progress import Progress


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


def test_a_terminal_has_a_bar_with_a_figure_at_once(shown_on: Callable[[int], str]) -> None:
    text = shown_on(100)
    assert "1/900" in text and "train 7.91 bits/token" in text and "\r" in text


def test_one_of_unknown_width_has_lines(shown_on: Callable[[int], str]) -> None:
    assert shown_on(0).split("\r\n")[0] == "step 1/900  train 7.91 bits/token"


def test_no_terminal_has_lines_and_the_log_too(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress(900, log=tmp_path / "log.txt", stream=stream) as progress:
        progress.report_first_step(1, 7.91)
    assert stream.getvalue() == "step 1/900  train 7.91 bits/token\n"
    assert (tmp_path / "log.txt").read_text().endswith("  step 1/900  train 7.91 bits/token\n")
