"""Tests the activity that a run reports."""

import pytest

from brt.training.progress import PhaseTracker, RunStatus


def test_a_phase_with_an_end_gives_way_to_the_one_before() -> None:
    clock = iter(range(100)).__next__
    phases, heard = PhaseTracker(clock), []
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


def test_what_a_thread_does_is_told_beside_it() -> None:
    phases, heard = PhaseTracker(), []
    phases.listen(lambda now: heard.append((now.phase, now.background)))
    with phases.in_background("committing"):
        phases.enter("stepping")
    assert heard == [("starting", "committing"), ("stepping", "committing"), ("stepping", "")]


def test_what_fails_stays_in_its_phase() -> None:
    phases = PhaseTracker()
    with pytest.raises(KeyError), phases.during("restoring"):
        raise KeyError
    assert phases.now.phase == "restoring"


def test_requests_to_stop_wait_for_what_nobody_interrupts() -> None:
    phases = PhaseTracker()
    for phase, waits in (("compiling", "compiling"), ("stepping", ""), ("evaluating", "")):
        phases.enter(phase)
        assert phases.uninterruptible == waits
