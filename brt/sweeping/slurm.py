"""Writes and submits a SLURM job array that has a task for each point of a sweep."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from brt import storage, user_files
from brt.errors import ConfigError
from brt.training.workdir import check_writable

# The script that `script` returns ends with these commands, which run the task of one point. The
# file launch/slurm/sweep.sh ends with the same commands.
BODY = """\
# A task gets SIGTERM two minutes before its time limit. It saves a checkpoint, ends with exit code
# 75 and is queued again; then it continues from the checkpoint.
stopped=
trap 'stopped=yes; kill -TERM "$child"' TERM
"${PYTHON:-python}" -m brt.sweep "$@" --array_index="$SLURM_ARRAY_TASK_ID" &
child=$!
wait "$child"
code=$?
while [ -n "$stopped" ]; do # The signal has ended only `wait`; the child is still running.
  stopped=
  wait "$child"
  code=$?
done
if [ "$code" -eq 75 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
"""


def script(
    points: int, workdir: Path, files: Sequence[str], bindings: Sequence[str], options: str
) -> str:
    """Returns a script for sbatch that runs every point of a sweep as a task of a job array.

    `files` and `bindings` are the values of --gin_file and --gin_bindings of brt.sweep; `options`
    are further options of sbatch, as on its command line. Wrong options raise ConfigError.
    """
    flags = [f"--gin_file={storage.shown(file)}" for file in files]
    flags += [f"--gin_bindings={binding}" for binding in bindings]
    flags += [*user_files.import_flags(), f"--workdir={storage.shown(workdir)}"]
    logs = _logs(workdir)
    try:
        more = shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--slurm={options!r} cannot be read: {error}") from error
    if stray := [word for word in more if not word.startswith("--")]:
        raise ConfigError(
            f"--slurm={options!r}: {stray[0]!r} is no option of sbatch; write --NAME=VALUE"
        )
    directives = [
        f"--job-name={workdir.name}",
        f"--array=0-{points - 1}",
        f"--output={logs}/%a.txt",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@120",
        *more,
    ]
    if bad := [directive for directive in directives if not directive.isprintable()]:
        raise ConfigError(
            f"{bad[0]!r} has a line end or another control character, which a script for SLURM "
            "cannot hold; name another --workdir, or leave it out of --slurm"
        )
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.quote(directive)}" for directive in directives),
            "",
            f"cd {shlex.quote(os.getcwd())} || exit 2",
            f"PYTHON={shlex.quote(sys.executable)}",
            *(["export PYTHONSAFEPATH=1"] if "-P" in user_files.python() else []),
            f"set -- {shlex.join(flags)}",
            "",
            BODY,
        ]
    )


def submit(text: str, workdir: Path) -> str:
    """Submits a script to SLURM with sbatch, and returns the output of sbatch."""
    # The directory of the logs is created here, because sbatch does not create it.
    logs = _logs(workdir)
    check_writable(logs.parent)
    check_writable(logs, below=logs.parent)
    try:
        done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError(
            "--submit needs sbatch, which is not on this machine; print the script with --slurm "
            "and submit it where it is"
        ) from error
    if done.returncode:
        raise ConfigError(f"sbatch refuses the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def _logs(workdir: Path) -> Path:
    """Returns the directory of the logs: a local one, because SLURM cannot write to buckets."""
    in_bucket = storage.shown(workdir) != str(workdir)
    return (Path(workdir.name) if in_bucket else workdir).absolute() / "slurm"
