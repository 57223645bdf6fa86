"""Tests that the stack traces of a process that hangs reach the bucket of its run."""

import os
import subprocess
import sys
import time

import pytest
from buckets import BucketServer, Fault

pytestmark = pytest.mark.slow_cases("*s3*")
STUCK = """
import sys, time
from pathlib import Path
from brt import storage
from brt.training import watchdog
from brt.training.progress import PhaseTracker

watchdog._PUBLISHING_SECONDS = float(sys.argv[2])
run = Path(storage.local(sys.argv[1]))
(run / "heartbeat").mkdir(parents=True)
mirror = storage.of(run)
with mirror._turn, watchdog.watching(PhaseTracker(), 0.05, run / "heartbeat/0.stacks.txt"):
    time.sleep(1000)  # while the main thread copies
"""


@pytest.mark.slow_cases("gs-False")
@pytest.mark.parametrize("answers", [True, False])
def test_the_stacks_are_copied_before_the_process_ends(
    server: BucketServer, scheme: str, answers: bool
) -> None:
    key = "runs/a/heartbeat/0.stacks.txt"
    if not answers:
        server.faults = [Fault("delay", "write", times=99, seconds=60)]
    url, begin = f"{scheme}://bucket/runs/a", time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STUCK, url, "20" if answers else "0.5"],
        env=os.environ.copy(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 70, done.stderr
    assert time.monotonic() - begin < 40
    assert "brt: no sign of life for" in done.stderr
    assert (f"and in {url}/heartbeat/0.stacks.txt;" in done.stderr) == answers
    stored = server.buckets["bucket"]
    assert {*stored} == ({key} if answers else set())
    if answers:
        assert b"most recent call first" in stored[key].content
