"""Starts brt.train and brt.evaluate for a point of a sweep, and explains why they fail.

A point is one run of the sweep. Several points can run in parallel, as jobs.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from brt import durable, user_files
from brt.errors import Preempted
from brt.formatting import one_line
from brt.sweeping.directory import PointDirectory
from brt.training.workdir import explain_write_errors

_KINDS = {2: "config", 3: "data", 4: "checkpoint", 5: "diverged", 70: "hung"}
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|MemoryError|std::bad_alloc|out of memory", re.I)
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_TAIL_BYTES = 20_000


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
    them. Jobs that may share a GPU allocate its memory when they need it: by default, the first of
    them would reserve three quarters of the memory, and the others would find too little.
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


def preempted(command: Command) -> bool:
    """Returns True if a command has ended because of a signal to stop, and not of an error."""
    # Training saves a checkpoint before it ends with the exit code of `Preempted`.
    return command.process.returncode in (Preempted.exit_code, -signal.SIGTERM)


def failure_reason(command: Command) -> str:
    """Returns one line that says why a command failed, which `explain` infers."""
    with command.output.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(command.offset, size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return explain(command.process.returncode, text)


def explain(code: int, text: str) -> str:
    """Returns the reason of a failure in one line; `code` is -N if signal N ended the command."""
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
