"""Writes checkpoints in the background and keeps the directory tidy.

The trainer is the only writer; everyone else uses `brt.checkpointing.reader`.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp

from brt import durable, tree_utils
from brt.checkpointing import manifest
from brt.checkpointing.reader import (
    FORMAT,
    LAST,
    META,
    STATE,
    join,
    last_saved,
    steps,
    verify,
    warn_on_stderr,
)
from brt.distributed import processes
from brt.errors import CheckpointError, NonFiniteError
from brt.formatting import size

_LATE_LOOKS, _LATE_SECONDS = 10, 0.2


def check_disk(directory: Path, needed: int) -> None:
    """Raises CheckpointError if fewer than `needed` bytes are free at `directory`."""
    free = _free_bytes(directory)
    if free < needed:
        raise CheckpointError(
            f"checkpoints need {size(needed)} in {directory}, where {size(free)} are free; make "
            f"room, or lower Checkpoint.keep or the size of the model"
        )


class CheckpointWriter:
    """Saves in the background; what goes wrong there is raised by the next call.

    Creating one removes what killed runs left behind, so only a trainer that holds the
    workdir's lock may do it. Of several processes each writes its own arrays, and the first one
    all the rest. As a context manager it is closed at the end.

    Args:
      directory: the `checkpoints` directory of a run, created if missing.
      keep: how many of the newest checkpoints stay.
      keep_every: checkpoints at multiples of so many steps stay for good; 0: none.
      beside: a context that is told what the background does.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        beside: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    ):
        self._directory = directory
        self._keep = keep
        self._keep_every = keep_every
        self._beside = beside
        self._pending: Future[None] | None = None
        self._last_step: int | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if processes.is_first():
                _clean(directory)
                _note_newest(directory)
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints to {directory}: {error.strerror}; see to the disk, or "
                "choose another --workdir"
            ) from error
        processes.wait_for_all("clean checkpoints")
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as own:
            if error is None:
                raise
            warn_on_stderr(str(own))  # the first error is the one to be raised

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Starts a save; returns when the arrays are copied and may be donated.

        Waits for the save before it. Saving the same step again does nothing.

        Args:
          step: completed steps, the name of the checkpoint.
          state: pytree of arrays.
          meta: anything that JSON can say; `step`, `format` and `arrays` are added.

        Raises:
          NonFiniteError: an array holds NaN or infinity; nothing is saved.
          CheckpointError: this save cannot start, or the one before it failed.
        """
        self.wait()
        if step == self._last_step:
            return
        named = tree_utils.named(state)
        if bad := tree_utils.not_finite(named):
            raise NonFiniteError(
                f"step {step} is not saved, because these hold NaN or infinity: {join(bad)}; "
                f"the newest checkpoint is {['none', *steps(self._directory)][-1]}"
            )
        arrays = tree_utils.describe(named)
        content = {**meta, "step": step, "format": FORMAT, "arrays": arrays}
        text = json.dumps(content, indent=1, allow_nan=False)
        partial = self._directory / f"{step}.partial"
        try:
            partial.mkdir(exist_ok=processes.several())
            # Orbax refuses arrays without elements; `restore` makes them from their shape.
            arrays = {name: leaf for name, leaf in named.items() if leaf.size}
            self._orbax.save((partial / STATE).absolute(), args=ocp.args.PyTreeSave(arrays))
        except Exception as error:  # a full disk has many names
            raise self._failure(step, error) from error
        self._last_step = step
        self._pending = self._thread.submit(self._finish, step, text)

    def check(self) -> None:
        """Raises the CheckpointError of a failed save; cheap, for every step."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the save in flight; raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits, and reads the last checkpoint back; CheckpointError if it is not whole."""
        try:
            self.wait()
            if self._last_step is not None and (
                problems := processes.is_first() and verify(self._directory, self._last_step)
            ):
                raise CheckpointError(
                    f"the last checkpoint, {self._last_step} in {self._directory}, is damaged: "
                    f"{join(problems)}; check the disk, then run again"
                )
        finally:
            self._last_step = None
            self._thread.shutdown()
            self._orbax.close()

    def _finish(self, step: int, meta: str) -> None:
        """In the background: from arrays being written to a checkpoint that counts."""
        partial = self._directory / f"{step}.partial"
        try:
            self._orbax.wait_until_finished()  # of all processes
            if not processes.is_first():
                return
            with self._beside("committing"):
                (partial / META).write_text(meta)
                manifest.write(partial)
                _commit(partial)
                durable.write(self._directory.parent / LAST, f"{step}\n".encode())
                self._prune(step)
        except Exception as error:
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        """Makes room again and says what happened."""
        error = _of_system(error)
        shortage = durable.shortage(self._directory, error)  # before what was written goes
        free = durable.room(self._directory, error)
        _discard(self._directory / f"{step}.partial")
        self._last_step = None
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if durable.no_room(error):
            cause = f"{shortage} ({free}); make room, then run again"
        elif isinstance(error, OSError) and durable.storage_fails(error):
            where = f" ({error.filename})" if error.filename else ""
            cause = f"{error.strerror or error}{where}; see to the disk, then run again"
        return CheckpointError(f"saving step {step} to {self._directory} failed: {cause}")

    def _prune(self, newest: int) -> None:
        old = [step for step in steps(self._directory) if step <= newest]
        for step in old[: -self._keep]:
            if not self._keep_every or step % self._keep_every:
                _remove(self._directory / str(step))


def _of_system(error: Exception) -> Exception:
    """The system's error that one of the array store quotes; else the same."""
    quoted = re.search(r"\[os_error_code='(\d+)'", str(error))
    full = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else 0
    code = int(quoted[1]) if quoted else full
    return error if isinstance(error, OSError) or not code else OSError(code, os.strerror(code))


def _commit(partial: Path) -> None:
    """Gives a complete checkpoint its name, in place of a damaged one of the same step."""
    final = partial.with_suffix("")
    if final.exists() or final.is_symlink():
        _remove(final)
    partial.rename(final)
    durable.sync(final.parent)


def _remove(path: Path) -> None:
    """Removes a checkpoint so that no reader sees half of it."""
    doomed = path.with_name(f"{path.name}.deleted")
    path.rename(doomed)
    _delete(doomed)


def _discard(partial: Path) -> None:
    """Removes what a failed save wrote. Orbax gives up with the first array that fails: what is
    being written of others makes the directory anew, for a moment that nobody tells the end of."""
    shutil.rmtree(partial, ignore_errors=True)
    for _ in range(_LATE_LOOKS):
        time.sleep(_LATE_SECONDS)
        if not partial.exists():
            return
        shutil.rmtree(partial, ignore_errors=True)


def _delete(path: Path) -> None:
    """Of a link, whose directory somebody put elsewhere, only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _clean(directory: Path) -> None:
    """Removes what a killed run left behind; a save that only lacked its name gets it."""
    for path in sorted(directory.iterdir(), reverse=True):  # 9.partial before 9.deleted
        if not re.fullmatch(r"[0-9]+\.(partial|deleted)", path.name):
            continue
        nameless = path.suffix == ".partial" and not os.path.exists(path.with_suffix(""))
        if nameless and not path.is_symlink() and not manifest.verify(path):
            _commit(path)
        else:
            _delete(path)


def _note_newest(directory: Path) -> None:
    """Names the newest step where a run ended between saving it and saying so."""
    newest = max(steps(directory), default=None)
    if newest is not None and newest > (last_saved(directory) or -1):
        durable.write(directory.parent / LAST, f"{newest}\n".encode())


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(durable.existing(directory)).free
