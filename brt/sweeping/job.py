"""Runs the points of a sweep, and writes the report of the sweep.

A point is one run of the sweep.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from brt import durable, output, tasks
from brt.checkpointing import reader
from brt.errors import BrtError, ConfigError, Preempted
from brt.sweeping import commands, report
from brt.sweeping.directory import PointDirectory, check_unchanged
from brt.sweeping.points import Point
from brt.sweeping.runner import Runner
from brt.sweeping.settings import Sweep
from brt.training import warm_start
from brt.training import workdir as workdirs
from brt.training.workdir import Workdir, explain_write_errors


def run(
    workdir: Path, points: Sequence[Point], chosen: Sequence[Point], sweep: Sweep, *, jobs: int
) -> str:
    """Runs the chosen points that are not finished, and writes the report about all points.

    The result is a text for the user with the table of results and the path of the report.

    Raises:
      ConfigError: the workdir contains another sweep, or the flags are invalid.
      DataError: data cannot be read; no point has been run.
      Preempted: a signal arrived; the progress of all points is saved.
      BrtError: some points failed; the others are finished.
    """
    _check_jobs(jobs)
    check_unchanged(workdir, points)
    runner = Runner(workdir, sweep.split, jobs, _say)
    todo = [point for point in chosen if not runner.finished(point)]
    if len(todo) < len(chosen):
        _say(f"{len(chosen) - len(todo)} of {len(chosen)} points are finished already")
    if todo:
        _prepare(workdir, todo, sweep.split)
        _create(workdir)
        runner.run(todo)
    text = write_report(workdir, points, sweep)
    _conclude(workdir, chosen, runner)
    return text


def write_report(workdir: Path, points: Sequence[Point], sweep: Sweep) -> str:
    """Writes the report of the results so far, and returns the text that `run` returns."""
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
            "the points will slow each other down, and their step times are not meaningful"
        )


def _prepare(workdir: Path, points: Sequence[Point], split: str) -> None:
    """Prepares each dataset once, so that parallel points do not do the same work."""
    # A point that has started has prepared its data already, and the weights that it started from
    # may be gone.
    datasets = {}
    for point in points:
        if reader.present(Workdir(workdir / point.directory).checkpoints):
            continue
        config, weights = point.config, warm_start.find_weights(point.config)
        if weights:  # The tokenizer may be that of the weights.
            config = warm_start.with_model(config, weights)
        task = tasks.from_config(config)
        datasets[task.name, getattr(config, task.data)] = task, config
    for task, config in datasets.values():
        task.open(config).split(split)


def _create(workdir: Path) -> None:
    workdirs.check_writable(workdir)
    workdirs.refuse_links(Workdir(workdir))


def _conclude(workdir: Path, points: Sequence[Point], runner: Runner) -> None:
    """Raises Preempted or BrtError unless all points are finished."""
    left = [point for point in points if not runner.finished(point)]
    failed = [
        p for p in left if PointDirectory(workdir / p.directory).progress().status == "failed"
    ]
    if len(left) > len(failed):
        done = f"{len(points) - len(left)} of {len(points)} points are finished"
        raise Preempted(f"{done}; run the same command again to continue")
    if failed:
        names = ", ".join(point.name for point in failed)
        raise BrtError(
            f"{len(failed)} of {len(points)} points failed: {names}; {workdir / 'report.md'} says "
            "why, and the same command tries them again"
        )


@contextlib.contextmanager
def _report_lock(workdir: Path) -> Iterator[None]:
    """Lets one process at a time write the report: jobs of a SLURM array may end simultaneously."""
    path = workdir / ".report.lock"
    with contextlib.ExitStack() as stack:
        with explain_write_errors(path):
            file = stack.enter_context(durable.open_file(path, "ab"))
            durable.acquire_lock(file, wait=True)
            durable.remove_abandoned(workdir)
        yield


def _say(line: str) -> None:
    output.say(line)
