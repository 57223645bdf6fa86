"""A sweep from its points to its report."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from brt import durable, locks, tasks
from brt.errors import BrtError, ConfigError, Preempted
from brt.sweeping import commands, report
from brt.sweeping.directory import Directory, check_unchanged
from brt.sweeping.points import Point
from brt.sweeping.runner import Runner
from brt.sweeping.settings import Sweep
from brt.training import workdir as workdirs


def run(
    workdir: Path, points: Sequence[Point], chosen: Sequence[Point], sweep: Sweep, *, jobs: int
) -> str:
    """Runs what is not finished and writes the report; returns its table and where it is.

    Args:
      points: all, for the report.
      chosen: those to run.
      jobs: points side by side.

    Raises:
      ConfigError: the workdir holds another sweep, or the flags make no sense.
      DataError: documents cannot be read; nothing has run then.
      Preempted: a signal came, and what ran is saved.
      BrtError: some points failed; the others are finished.
    """
    _check_jobs(jobs)
    check_unchanged(workdir, points)
    runner = Runner(workdir, sweep.split, jobs, _say)
    todo = [point for point in chosen if not runner.finished(point)]
    if len(todo) < len(chosen):
        _say(f"{len(chosen) - len(todo)} of {len(chosen)} points are finished already")
    if todo:
        _prepare(todo, sweep.split)
        _make(workdir)
        runner.run(todo)
    text = write_report(workdir, points, sweep)
    _conclude(workdir, chosen, runner)
    return text


def write_report(workdir: Path, points: Sequence[Point], sweep: Sweep) -> str:
    """Writes the report of what there is; returns its table and where it is.

    Raises:
      ConfigError: the workdir does not exist, or holds another sweep.
    """
    if not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir} does not exist, so there is nothing to report")
    check_unchanged(workdir, points)
    with _report_lock(workdir):
        table = report.write(workdir, points, sweep)
    return f"{table}\n\nreport: {workdir / 'report.md'}"


def _check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise ConfigError(f"--jobs={jobs} must be at least 1")
    if jobs > commands.cores():
        _say(
            f"warning: --jobs={jobs} is more than the {commands.cores()} cores of this machine; "
            "the points will wait for each other, and their step times mean little"
        )


def _prepare(points: Sequence[Point], split: str) -> None:
    """Makes every corpus once, before points would do so side by side."""
    found = {}
    for config in (point.config for point in points):
        task = tasks.from_config(config)
        found[task.name, getattr(config, task.data)] = task, config
    for task, config in found.values():
        task.open(config).split(split)


def _make(workdir: Path) -> None:
    workdirs.check_writable(workdir)
    workdirs.refuse_links(workdirs.Workdir(workdir))


def _conclude(workdir: Path, points: Sequence[Point], runner: Runner) -> None:
    """Raises what says that not all points are finished."""
    left = [point for point in points if not runner.finished(point)]
    failed = [p for p in left if Directory(workdir / p.directory).progress().status == "failed"]
    if len(left) > len(failed):
        done = f"{len(points) - len(left)} of {len(points)} points are finished"
        raise Preempted(f"{done}; run the same command again to go on")
    if failed:
        names = ", ".join(point.name for point in failed)
        raise BrtError(
            f"{len(failed)} of {len(points)} points failed: {names}; {workdir / 'report.md'} says "
            "why, and the same command tries them again"
        )


@contextlib.contextmanager
def _report_lock(workdir: Path) -> Iterator[None]:
    """One writer at a time; the tasks of an array end when they like."""
    path = workdir / ".report.lock"
    with contextlib.ExitStack() as stack:
        with workdirs.explained(path):
            file = stack.enter_context(durable.open_file(path, "ab"))
            locks.acquire(file, wait=True)
            durable.remove_abandoned(workdir)
        yield


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
