"""Runs the points of a sweep as subprocesses, several in parallel.

A point is one run of the sweep.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from brt.sweeping import commands
from brt.sweeping.commands import Command
from brt.sweeping.directory import PointDirectory, PointProgress
from brt.sweeping.points import Point
from brt.training.preemption import StopSignal
from brt.training.progress import clock

_POLL_SECONDS = 0.2


@dataclasses.dataclass
class _Job:
    """A point that occupies one of the slots for parallel points."""

    point: Point
    directory: PointDirectory
    slot: int
    lock: IO[bytes]  # an open file that locks the point until it leaves the slot
    begin: float  # when the command started, as `time.monotonic` measures it
    progress: PointProgress  # when the command started
    command: Command
    asked_to_stop: bool = False  # True after the command was sent SIGTERM


class Runner:
    """Runs unfinished points (runs of a sweep), `jobs` of them in parallel, each in subprocesses.

    `split` is the split on which trained points are evaluated. `say` is called with a line of text
    about every event, such as the end of a point.
    """

    def __init__(self, workdir: Path, split: str, jobs: int, say: Callable[[str], None]):
        self._workdir, self._split, self._jobs, self._say = workdir, split, jobs, say
        self._running: list[_Job] = []
        self._announced: set[int] = set()

    def run(self, points: Sequence[Point]) -> None:
        """Trains and evaluates points until all have ended or a signal has stopped them."""
        self._names = max((len(point.name) for point in points), default=0)
        self._digits = len(str(len(points)))
        self._order = {point.number: number for number, point in enumerate(points, 1)}
        waiting = list(points)
        with StopSignal(announce=self._say) as stop:
            try:
                while waiting or self._running:
                    if stop.requested:
                        waiting = []
                        self._stop()
                    elif waiting and len(self._running) < self._jobs:
                        waiting = self._start(waiting)
                    self._running = [job for job in map(self._advance, self._running) if job]
                    time.sleep(_POLL_SECONDS)
            finally:
                self._stop()  # If the loop raised an exception, running points are stopped.

    def finished(self, point: Point) -> bool:
        """Returns True if a point has been trained and evaluated on the split."""
        directory = PointDirectory(self._workdir / point.directory)
        done = directory.progress().status == "finished"
        return done and directory.evaluation(self._split) is not None

    def _start(self, waiting: list[Point]) -> list[Point]:
        """Starts the first point that no other process runs; returns the points that still wait."""
        for point in waiting:
            directory = PointDirectory(self._workdir / point.directory)
            lock = directory.lock()
            if lock is None:
                self._wait(point)
                continue
            rest = [other for other in waiting if other is not point]
            if self.finished(point):  # Another process may have finished the point meanwhile.
                lock.close()
                return rest
            slots = {job.slot for job in self._running}
            slot = next(i for i in range(self._jobs) if i not in slots)
            progress = dataclasses.replace(
                directory.progress(), reason="", threads=commands.threads(self._jobs)
            )
            self._running.append(self._launch(point, directory, slot, lock, progress))
            return rest
        return waiting

    def _wait(self, point: Point) -> None:
        if point.number not in self._announced:
            self._announced.add(point.number)
            self._report(
                point, "is still run by another process, perhaps of an earlier start; waiting"
            )

    def _launch(
        self,
        point: Point,
        directory: PointDirectory,
        slot: int,
        lock: IO[bytes],
        progress: PointProgress,
    ) -> _Job:
        """Starts the next command of a point."""
        trained = progress.status in ("trained", "finished")
        where = f"--workdir={directory.path}"
        if trained:
            arguments = ["brt.evaluate", where, f"--split={self._split}"]
        else:
            continued = progress.status != "waiting"
            arguments = ["brt.train", f"--gin_file={directory.gin}", where]
            progress = dataclasses.replace(progress, status="unfinished")
            self._report(point, "training continues" if continued else "training")
        directory.write(point, progress)
        command = commands.start(arguments, directory, slot, self._jobs, lock)
        return _Job(point, directory, slot, lock, time.monotonic(), progress, command)

    def _advance(self, job: _Job) -> _Job | None:
        """Returns the job with its running or next command; None if the point has ended."""
        if job.command.process.poll() is None:
            return job
        seconds = time.monotonic() - job.begin
        progress = dataclasses.replace(job.progress, seconds=job.progress.seconds + seconds)
        if job.command.process.returncode == 0 and progress.status == "unfinished":
            progress = dataclasses.replace(progress, status="trained")
            if not job.asked_to_stop:
                return self._launch(job.point, job.directory, job.slot, job.lock, progress)
        progress, event = self._outcome(job, progress)
        job.directory.write(job.point, progress)
        job.lock.close()
        self._report(job.point, event)
        return None

    def _outcome(self, job: _Job, progress: PointProgress) -> tuple[PointProgress, str]:
        """Returns the progress of a point whose last command has ended, and a message."""
        command = job.command
        if command.process.returncode == 0 and not job.asked_to_stop:
            event = f"finished in {clock(progress.seconds)}"
            return dataclasses.replace(progress, status="finished"), event
        if job.asked_to_stop or commands.preempted(command):
            return dataclasses.replace(progress, reason="stopped by a signal"), "stopped"
        reason = commands.failure_reason(command)
        return dataclasses.replace(progress, status="failed", reason=reason), f"failed: {reason}"

    def _stop(self) -> None:
        for job in self._running:
            if not job.asked_to_stop:
                job.asked_to_stop = True
                job.command.process.terminate()

    def _report(self, point: Point, what: str) -> None:
        number = f"{self._order[point.number]:>{self._digits}}/{len(self._order)}"
        self._say(f"{time.strftime('%H:%M:%S')}  {number}  {point.name:<{self._names}}  {what}")
