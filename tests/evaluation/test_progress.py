"""Tests the progress lines of an evaluation when stderr is not a terminal."""

import pytest

from brt.evaluation import job


def test_a_log_has_a_line_when_one_is_due(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with job.display(5000, "reading test", "tok") as update:
        for seconds in (30, 59, 61, 119, 122):
            now[0] = float(seconds)
            update(1000)
    assert capsys.readouterr().err.splitlines() == [
        "reading test: 3,000 of 5,000 tokens",
        "reading test: 5,000 of 5,000 tokens",
    ]
