"""Runs the points of a sweep as processes, some side by side, until all have ended."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from brt.sweeping import commands
from brt.sweeping.commands import Command
from brt.sweeping.directory import Directory, Progress
from brt.sweeping.points import Point
from brt.training.preemption import StopSignal
from brt.training.progress import clock

_POLL_SECONDS = 0.2


@dataclasses.dataclass
class _Job:
    """A point that occupies a slot; the lock is held until it leaves."""

    point: Point
    directory: Directory
    slot: int
    lock: IO[bytes]
    begin: float
    progress: Progress
    command: Command
    asked_to_stop: bool = False


class Runner:
    """Runs points that are not finished, each in its own processes.

    Args:
      split: that a trained point is evaluated on.
      jobs: points side by side.
      say: told every event as one line.
    """

    def __init__(self, workdir: Path, split: str, jobs: int, say: Callable[[str], None]):
        self._workdir, self._split, self._jobs, self._say = workdir, split, jobs, say
        self._running: list[_Job] = []
        self._taken: set[int] = set()

    def run(self, points: Sequence[Point]) -> None:
        """Returns when every point has ended, or when those that run have stopped on a signal."""
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
                self._stop()  # where something above failed

    def finished(self, point: Point) -> bool:
        """Whether nothing is left to do for a point."""
        directory = Directory(self._workdir / point.directory)
        done = directory.progress().status == "finished"
        return done and directory.evaluation(self._split) is not None

    def _start(self, waiting: list[Point]) -> list[Point]:
        """Starts the first point that no other process has; returns those still waiting."""
        for point in waiting:
            directory = Directory(self._workdir / point.directory)
            lock = directory.lock()
            if lock is None:
                self._wait(point)
                continue
            rest = [other for other in waiting if other is not point]
            if self.finished(point):  # by that other process
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
        if point.number not in self._taken:
            self._taken.add(point.number)
            self._tell(
                point, "is still run by another process, perhaps of an earlier start; waiting"
            )

    def _launch(
        self, point: Point, directory: Directory, slot: int, lock: IO[bytes], progress: Progress
    ) -> _Job:
        """Starts the command that the point needs next."""
        trained = progress.status in ("trained", "finished")
        where = f"--workdir={directory.path}"
        if trained:
            arguments = ["brt.evaluate", where, f"--split={self._split}"]
        else:
            again = progress.status != "waiting"
            arguments = ["brt.train", f"--gin_file={directory.gin}", where]
            progress = dataclasses.replace(progress, status="unfinished")
            self._tell(point, "training goes on" if again else "training")
        directory.write(point, progress)
        command = commands.start(arguments, directory, slot, self._jobs, lock)
        return _Job(point, directory, slot, lock, time.monotonic(), progress, command)

    def _advance(self, job: _Job) -> _Job | None:
        """The job that has the slot now: the same, or the point's next command, or none."""
        if job.command.process.poll() is None:
            return job
        taken = time.monotonic() - job.begin
        progress = dataclasses.replace(job.progress, seconds=job.progress.seconds + taken)
        if job.command.process.returncode == 0 and progress.status == "unfinished":
            progress = dataclasses.replace(progress, status="trained")
            if not job.asked_to_stop:
                return self._launch(job.point, job.directory, job.slot, job.lock, progress)
        progress, event = self._outcome(job, progress)
        job.directory.write(job.point, progress)
        job.lock.close()
        self._tell(job.point, event)
        return None

    def _outcome(self, job: _Job, progress: Progress) -> tuple[Progress, str]:
        """What became of a point whose last command ended, and how to say it."""
        command = job.command
        if command.process.returncode == 0 and not job.asked_to_stop:
            event = f"finished in {clock(progress.seconds)}"
            return dataclasses.replace(progress, status="finished"), event
        if job.asked_to_stop or commands.preempted(command):
            return dataclasses.replace(progress, reason="stopped by a signal"), "stopped"
        reason = commands.reason(command)
        return dataclasses.replace(progress, status="failed", reason=reason), f"failed: {reason}"

    def _stop(self) -> None:
        for job in self._running:
            if not job.asked_to_stop:
                job.asked_to_stop = True
                job.command.process.terminate()

    def _tell(self, point: Point, what: str) -> None:
        number = f"{self._order[point.number]:>{self._digits}}/{len(self._order)}"
        self._say(f"{time.strftime('%H:%M:%S')}  {number}  {point.name:<{self._names}}  {what}")
