"""Runs the points of a sweep, and writes the report of the sweep.

A point is one run of the sweep.
"""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from brt import durable, output, storage, tasks, user_files
from brt.checkpointing import reader
from brt.errors import BrtError, ConfigError, Preempted
from brt.formatting import one_line
from brt.sweeping import report
from brt.sweeping.directory import PointDirectory, PointProgress, check_unchanged
from brt.sweeping.points import Point, Sweep
from brt.training import run as runs
from brt.training import workdir as workdirs
from brt.training.preemption import StopSignal
from brt.training.progress import clock
from brt.training.workdir import Workdir, explain_write_errors

_KINDS = {2: "config", 3: "data", 4: "checkpoint", 5: "diverged", 70: "hung"}  # by exit code
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|MemoryError|std::bad_alloc|out of memory", re.I)
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_TAIL_BYTES = 20_000
_POLL_SECONDS = 0.2


class Command(NamedTuple):
    """A subprocess that trains or evaluates a point (one run of a sweep)."""

    process: subprocess.Popen
    output: Path  # the file with the output of all subprocesses of the point
    offset: int  # the position in the file where the output of this subprocess begins


def start(
    arguments: list[str], directory: PointDirectory, slot: int, jobs: int, lock: IO[bytes]
) -> Command:
    """Starts `python -m` with `arguments`, and appends the output to the point's output.txt.

    `slot` is the number of the parallel job, from 0 to `jobs` - 1. `lock` is an open file that
    locks the point; the subprocess inherits the file.
    """
    arguments = [*arguments, *user_files.import_flags()]
    with (
        explain_write_errors(directory.output),
        durable.open_file(directory.output, "ab", below=directory.path.parent) as output,
    ):
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  python -m {' '.join(arguments)}"
        output.write(f"{one_line(line)}\n".encode())
        output.flush()
        offset = output.tell()
        process = subprocess.Popen(
            [*user_files.python(), *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment(os.environ, slot, jobs),
            # In a process group of its own, the subprocess does not receive Ctrl-C from the
            # terminal. Instead, the sweep sends the subprocess a signal to stop.
            process_group=0,
            # The subprocess holds the lock, too, so the point stays locked if the sweep is killed.
            pass_fds=(lock.fileno(),),
        )  # fmt: skip
    return Command(process, directory.output, offset)


def threads(jobs: int) -> int:
    """Returns the number of threads of a job, its equal share of the cores; 0 means no limit."""
    return 0 if jobs == 1 else max(1, cores() // jobs)


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment(base: Mapping[str, str], slot: int, jobs: int) -> dict[str, str]:
    """Returns the environment variables of a job, with its share of the cores and GPUs.

    Settings of the user for XLA are kept. GPUs are only distributed if CUDA_VISIBLE_DEVICES lists
    them. Jobs that may share a GPU allocate its memory when they need it: by default, the first job
    would reserve three quarters of the memory, and the other jobs would find too little.
    """
    result = dict(base)
    if jobs > 1:
        result.setdefault("PJRT_NPROC", str(threads(jobs)))
        gpus = [gpu for gpu in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        if len(gpus) < jobs:
            result.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if gpus:
            result["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot % len(gpus) :: jobs])
    return result


def failure_reason(command: Command) -> str:
    """Returns one line that says why a command failed, from its exit code and its output."""
    with command.output.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(command.offset, size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return explain(command.process.returncode, text)


def explain(code: int, text: str) -> str:
    """Returns why a command with this exit code (-N after signal N) and output `text` failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line.removeprefix("brt: error: ") for line in lines if line.startswith("brt: error: ")
    ]
    last = (errors or lines or ["it printed nothing"])[-1]
    if code in _KINDS:
        return f"{_KINDS[code]}: {last}"
    if code in _KILLED:
        return "killed, probably out of memory"
    if _OUT_OF_MEMORY.search(text):
        return "out of memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"crashed (exit code {code}): {last}"


@dataclasses.dataclass
class _Job:
    """A point that occupies one of the slots for parallel points."""

    point: Point
    directory: PointDirectory
    slot: int
    lock: IO[bytes]  # an open file that locks the point until the point leaves the slot
    begin: float  # when the command started, as `time.monotonic` measures it
    progress: PointProgress  # the point's progress when the command started
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
        # The numbers of the points that were already reported as run by another process.
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
                if point.number not in self._announced:
                    self._announced.add(point.number)
                    said = "is still run by another process, perhaps of an earlier start; waiting"
                    self._report(point, said)
                continue
            if point.number in self._announced:
                storage.of(self._workdir).refresh()
            rest = [other for other in waiting if other is not point]
            if self.finished(point):  # Another process may have finished the point meanwhile.
                lock.close()
                return rest
            slots = {job.slot for job in self._running}
            slot = next(i for i in range(self._jobs) if i not in slots)
            progress = dataclasses.replace(
                directory.progress(), reason="", threads=threads(self._jobs)
            )
            self._running.append(self._launch(point, directory, slot, lock, progress))
            return rest
        return waiting

    def _launch(
        self,
        point: Point,
        directory: PointDirectory,
        slot: int,
        lock: IO[bytes],
        progress: PointProgress,
    ) -> _Job:
        """Starts brt.train for a point or, if it is trained, brt.evaluate; returns the job."""
        trained = progress.status in ("trained", "finished")
        where = f"--workdir={storage.shown(directory.path)}"
        if trained:
            arguments = ["brt.evaluate", where, f"--split={self._split}"]
        else:
            continued = progress.status != "waiting"
            arguments = ["brt.train", f"--gin_file={directory.gin}", where]
            progress = dataclasses.replace(progress, status="unfinished")
            self._report(point, "training continues" if continued else "training")
        directory.write(point, progress)
        command = start(arguments, directory, slot, self._jobs, lock)
        return _Job(point, directory, slot, lock, time.monotonic(), progress, command)

    def _advance(self, job: _Job) -> _Job | None:
        """Returns the job with its running or next command; None if the point has ended."""
        if job.command.process.poll() is None:
            return job
        storage.of(self._workdir).refresh()
        seconds = time.monotonic() - job.begin
        progress = dataclasses.replace(job.progress, seconds=job.progress.seconds + seconds)
        if job.command.process.returncode == 0 and progress.status == "unfinished":
            progress = dataclasses.replace(progress, status="trained")
            if not job.asked_to_stop:
                return self._launch(job.point, job.directory, job.slot, job.lock, progress)
        progress, event = self._outcome(job, progress)
        job.directory.write(job.point, progress)
        storage.of(self._workdir).publish()
        job.lock.close()
        self._report(job.point, event)
        return None

    def _outcome(self, job: _Job, progress: PointProgress) -> tuple[PointProgress, str]:
        """Returns the progress of a point whose last command has ended, and a message."""
        command = job.command
        if command.process.returncode == 0 and not job.asked_to_stop:
            event = f"finished in {clock(progress.seconds)}"
            return dataclasses.replace(progress, status="finished"), event
        # Training saves a checkpoint before it ends with the exit code of `Preempted`.
        stopped = command.process.returncode in (Preempted.exit_code, -signal.SIGTERM)
        if job.asked_to_stop or stopped:
            return dataclasses.replace(progress, reason="stopped by a signal"), "stopped"
        reason = failure_reason(command)
        return dataclasses.replace(progress, status="failed", reason=reason), f"failed: {reason}"

    def _stop(self) -> None:
        for job in self._running:
            if not job.asked_to_stop:
                job.asked_to_stop = True
                job.command.process.terminate()

    def _report(self, point: Point, what: str) -> None:
        number = f"{self._order[point.number]:>{self._digits}}/{len(self._order)}"
        self._say(f"{time.strftime('%H:%M:%S')}  {number}  {point.name:<{self._names}}  {what}")


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
    if jobs < 1:
        raise ConfigError(f"--jobs={jobs} must be at least 1")
    if jobs > cores():
        output.say(
            f"warning: --jobs={jobs} is more than the {cores()} cores of this machine; "
            "the points will slow each other down, and their step times are not meaningful"
        )
    check_unchanged(workdir, points)
    runner = Runner(workdir, sweep.split, jobs, output.say)
    todo = [point for point in chosen if not runner.finished(point)]
    if len(todo) < len(chosen):
        output.say(f"{len(chosen) - len(todo)} of {len(chosen)} points are finished already")
    if todo:
        storage.of(workdir).probe()
        _prepare(workdir, todo, sweep.split)
        workdirs.check_writable(workdir)
        workdirs.refuse_links(Workdir(workdir))
        runner.run(todo)
    text = write_report(workdir, points, sweep)
    _conclude(workdir, chosen, runner)
    return text


def write_report(workdir: Path, points: Sequence[Point], sweep: Sweep) -> str:
    """Writes the report of the results so far. Returns its table and path as text, like `run`."""
    if not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir} does not exist, so there is nothing to report")
    storage.of(workdir).refresh()
    check_unchanged(workdir, points)
    with _report_lock(workdir):
        table = report.write(workdir, points, sweep)
    return f"{table}\n\nreport: {workdir / 'report.md'}"


def _prepare(workdir: Path, points: Sequence[Point], split: str) -> None:
    """Prepares each dataset once, so that parallel points do not do the same work."""
    # A point with checkpoints is left out: it has prepared its data already, and the weights that
    # it started from may be gone.
    datasets = {}
    for point in points:
        if reader.present(Workdir(workdir / point.directory).checkpoints):
            continue
        config, weights = point.config, runs.find_weights(point.config)
        if weights:  # The tokenizer of the weights may encode the data.
            config = runs.with_model(config, weights)
        task = tasks.from_config(config)
        datasets[task.name, getattr(config, task.data)] = task, config
    for task, config in datasets.values():
        task.open(config).split(split)


def _conclude(workdir: Path, points: Sequence[Point], runner: Runner) -> None:
    """Raises Preempted or BrtError unless all points are finished."""
    unfinished = [point for point in points if not runner.finished(point)]
    failed = [
        p for p in unfinished if PointDirectory(workdir / p.directory).progress().status == "failed"
    ]
    if len(unfinished) > len(failed):
        done = f"{len(points) - len(unfinished)} of {len(points)} points are finished"
        raise Preempted(f"{done}; run the same command again to continue")
    if failed:
        names = ", ".join(point.name for point in failed)
        raise BrtError(
            f"{len(failed)} of {len(points)} points failed: {names}; {workdir / 'report.md'} says "
            "why, and the same command tries them again"
        )


@contextlib.contextmanager
def _report_lock(workdir: Path) -> Iterator[None]:
    """Lets one process at a time write the report, as jobs of a SLURM array may end together."""
    path = workdir / ".report.lock"
    with contextlib.ExitStack() as stack:
        with explain_write_errors(path):
            file = stack.enter_context(durable.open_file(path, "ab"))
            durable.acquire_lock(file, wait=True)
            durable.remove_abandoned(workdir)
        yield
