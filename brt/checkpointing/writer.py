"""Writes checkpoints in the background, and removes old checkpoints.

Only a trainer writes checkpoints. All other commands use `brt.checkpointing.reader`, which
describes the format.

The frozen arrays of a checkpoint, which no training step changes, are in its directory `frozen`,
and all other arrays in its directory `state`. The files in `frozen` are hard links to the files of
the previous checkpoint, so that the frozen arrays take disk space only once. Every checkpoint
nevertheless is a complete directory, which can be copied or deleted on its own.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils

from brt import bounded, durable, storage, tree_utils, untrusted
from brt.checkpointing import manifest, reader, shards
from brt.checkpointing.reader import (
    FORMAT,
    FROZEN,
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
from brt.errors import BrtError, CheckpointError, NonFiniteError
from brt.formatting import size

# Orbax calls this function twice in each save, only to log metrics of TensorStore. The function is
# replaced, because TensorStore 0.1.86 never frees the lists of metrics that it returns.
tensorstore_utils.get_tensorstore_raw_bytes = lambda *_, **__: 0

# A file system reports one of these errors if it has no hard links, if it cannot link the two
# directories, or if the file to link has been removed.
_NO_LINKS = {
    errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK,
    errno.EXDEV, errno.ENOENT,
}  # fmt: skip


def link_frozen(
    directory: Path, step: int, names: Collection[str], target: Path
) -> dict[str, str] | None:
    """Links the files of the frozen arrays of the checkpoint `step` into a new checkpoint.

    `target` is the directory of the new checkpoint. Returns a dictionary from the path of each
    linked file in the checkpoint to the file's SHA-256 checksum. Returns None if the arrays have to
    be written instead: the frozen arrays of the checkpoint `step` are not exactly `names`, or its
    files cannot be read or linked. OSError is raised if the disk is full or fails.
    """
    source = directory / str(step)
    try:
        if set(reader.read_meta(directory, step).get("frozen", ())) != set(names):
            return None
        known = manifest.read(source)
        files = [path for path in sorted((source / reader.FROZEN).rglob("*")) if path.is_file()]
        checksums = {path.relative_to(source).as_posix(): path for path in files}
        if any(path.is_symlink() for path in files) or not checksums.keys() <= known.keys():
            return None
        for name, path in checksums.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target / name)
    except (CheckpointError, ValueError):
        return None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.rmtree(target / reader.FROZEN, ignore_errors=True)
        return None
    return {name: known[name] for name in checksums} or None


# Writes that are still running after a failed save may create the directory of the save again after
# `_discard` has removed it. `_discard` therefore checks for the directory up to _LATE_LOOKS times,
# at intervals of _LATE_SECONDS seconds.
_LATE_LOOKS, _LATE_SECONDS = 10, 0.2


def check_disk(directory: Path, needed: int, remedy: str = "") -> None:
    free = shutil.disk_usage(durable.nearest_existing(directory)).free
    if free < needed:
        raise CheckpointError(
            f"checkpoints need {size(needed)} in {directory}, where {size(free)} are free; make "
            f"room{remedy}"
        )


class CheckpointWriter:
    """Saves checkpoints in a background thread.

    If a save, or copying it to the bucket of the run, fails in the background, the next call of
    `check`, `wait`, `save` or `close` raises CheckpointError. Creating a writer removes the files
    that killed runs left behind, so only a trainer that holds the lock of the run directory may
    create a writer. With several processes, each process writes its shards of the arrays, and the
    first process writes everything else.

    Args:
      directory: the `checkpoints` directory of a run, which is created if it does not exist.
      keep: the number of newest checkpoints that are kept; older ones are removed.
      keep_every: checkpoints at multiples of this number of steps are never removed; 0 if there are
        no such checkpoints.
      in_background: a function from the name of a phase, which is "committing", to a context. The
        background thread is in this context while it completes a checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        in_background: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    ):
        self._directory = directory
        self._keep = keep
        self._keep_every = keep_every
        self._in_background = in_background
        self._pending: Future[None] | None = None
        self._last_step: int | None = None
        self._frozen: frozenset[str] = frozenset()
        self._frozen_step: int | None = None
        # True if each process has a directory of its own, which is copied to a bucket.
        self._apart = processes.several() and storage.of(directory).apart
        try:
            directory.mkdir(exist_ok=True)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._place: int | None = os.open(directory, flags)
            if processes.is_first():
                _clean(directory)
                newest = max(steps(directory), default=-1)
                # A killed run may have saved a step without writing the file LAST, which is then
                # written here.
                if newest > (-1 if (last := last_saved(directory)) is None else last):
                    durable.write(directory.parent / LAST, f"{newest}\n".encode())
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints to {directory}: {error.strerror}; see to the disk, or "
                "choose another --workdir"
            ) from error
        processes.wait_for_all("clean checkpoints")
        self._failed = False
        # Orbax must not create directories in the background. If creating a directory failed,
        # orbax's threads would wait for the directory and keep the process alive for minutes.
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(),
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        moved = self._moved()
        try:
            self.close()
        except BrtError as close_error:
            if error is None:
                raise
            # The error that ended the context came first and is raised. The error of closing is
            # therefore only reported, unless both have the same cause.
            if not moved:
                warn_on_stderr(str(close_error))

    def freeze(self, names: Collection[str], step: int | None) -> None:
        """Declares arrays that no step changes, so that checkpoints share their files.

        `names` are paths in the pytrees that are passed to `save`, such as "params/embedding".
        `step` is the step of an existing checkpoint whose files contain these arrays; None if there
        is no such checkpoint.
        """
        # If each process has its own directory, no process can link the files that the others have
        # written, so checkpoints share no files.
        self._frozen = frozenset() if self._apart else frozenset(names)
        self._frozen_step = step

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Starts to save a checkpoint.

        The method first waits for the previous save. It returns when the arrays have been copied,
        so that the caller may then donate the arrays to a jitted function. The file meta.json gets
        the entries of `meta` and those that `reader.read_meta` lists. If the previous call saved
        this step, the method does nothing.

        If an array holds NaN or infinity, NonFiniteError is raised and nothing is saved.
        CheckpointError is raised if the save cannot start, or if the previous save failed.
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
        if self._frozen:
            content["frozen"] = sorted(self._frozen)
        text = json.dumps(content, indent=1, allow_nan=False)
        partial = self._directory / f"{step}.partial"
        try:
            partial.mkdir(exist_ok=processes.several())
            # Orbax refuses arrays without elements. `reader.restore` creates such arrays from their
            # shapes.
            arrays = {name: leaf for name, leaf in named.items() if leaf.size}
            checksums = self._save_frozen(partial, arrays) if self._frozen else {}
            changing = {name: leaf for name, leaf in arrays.items() if name not in self._frozen}
            parts = shards.copied(changing) if self._apart else []
            if not self._apart:
                self._orbax.save((partial / STATE).absolute(), args=self._arguments(changing))
        # Orbax reports a full disk by errors of various classes, so all classes are caught.
        except Exception as error:
            raise self._failure(step, error) from error
        self._last_step = step
        self._pending = self._thread.submit(self._finish, step, text, checksums, parts)

    def _arguments(self, arrays: Mapping[str, Any]) -> ocp.args.PyTreeSave:
        """Returns Orbax's arguments, which limit the size of files for a bucket (FILE_BYTES)."""
        if not storage.of(self._directory).apart:
            return ocp.args.PyTreeSave(arrays)
        limited = ocp.SaveArgs(chunk_byte_size=shards.FILE_BYTES)
        return ocp.args.PyTreeSave(
            arrays, dict.fromkeys(arrays, limited), ocdbt_target_data_file_size=shards.FILE_BYTES
        )

    def _save_frozen(self, partial: Path, arrays: Mapping[str, Any]) -> dict[str, str]:
        """Links the files of the frozen arrays, or writes the arrays if the files cannot be linked.

        Returns a dictionary from the paths of linked files in the checkpoint to their checksums.
        """
        checksums = None
        if processes.is_first() and self._frozen_step is not None:
            checksums = link_frozen(self._directory, self._frozen_step, self._frozen, partial)
        if not processes.from_first(checksums is not None, "frozen arrays"):
            kept = {name: leaf for name, leaf in arrays.items() if name in self._frozen}
            self._orbax.save((partial / FROZEN).absolute(), args=self._arguments(kept))
            self._orbax.wait_until_finished()
        return checksums or {}

    def check(self) -> None:
        """Raises CheckpointError if a save has failed; does not wait for a save in progress."""
        storage.of(self._directory).check()
        if self._pending is None or self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the save in progress, and checks that the directory has not been moved."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        if moved := self._moved():
            raise moved

    def _moved(self) -> CheckpointError | None:
        """Returns an error if the writer's directory is no longer at its path, or else None."""
        try:
            place = self._place  # None after `close`.
            same = place is None or os.path.samestat(os.stat(self._directory), os.fstat(place))
        except OSError as error:  # Any other error is ignored, because the next save reports it.
            same = not isinstance(error, FileNotFoundError | NotADirectoryError)
        if same:
            return None
        return CheckpointError(
            f"{self._directory} was moved or removed while the run trained; run again with its new "
            "--workdir, to go on from the newest checkpoint there"
        )

    def close(self) -> None:
        """Waits for the save in progress, and verifies the checkpoint that was saved last."""
        try:
            self.wait()
            if self._last_step is not None and (
                problems := processes.is_first()
                and not self._apart  # What other processes have written is not read back.
                and verify(self._directory, self._last_step)
            ):
                raise CheckpointError(
                    f"the last checkpoint, {self._last_step} in {self._directory}, is damaged: "
                    f"{join(problems)}; check the disk, then run again"
                )
        finally:
            self._last_step = None
            self._thread.shutdown()
            place, self._place = self._place, None
            if place is not None:
                os.close(place)
            try:
                self._orbax.close()
            except Exception as error:
                # After a save has failed and been reported, errors here are ignored.
                if not self._failed:
                    raise CheckpointError(
                        f"closing {self._directory} failed: {error}; see to the disk, then run "
                        "again"
                    ) from error

    def _finish(
        self, step: int, meta: str, checksums: Mapping[str, str], parts: list[shards.Part]
    ) -> None:
        """Completes a save in the background thread, once orbax has written the arrays.

        `meta` is the text of meta.json, and `checksums` has the checksums of linked files. If the
        processes have no common directory, orbax has written nothing, and this method writes
        `parts`, the shards of this process.
        """
        partial = self._directory / f"{step}.partial"
        try:
            # Both branches end after all processes have written their arrays.
            if self._apart:
                checksums = self._write_apart(step, parts)
            else:
                self._orbax.wait_until_finished()
            if moved := self._moved():
                raise moved
            if not processes.is_first():
                return
            with self._in_background("committing"):
                (partial / META).write_text(meta)
                manifest.write(partial, checksums)
                bounded.trust(bounded.key((partial / manifest.NAME).read_bytes()))
                _commit(partial)
                self._frozen_step = step
                durable.write(self._directory.parent / LAST, f"{step}\n".encode())
                old = [one for one in steps(self._directory) if one <= step][: -self._keep]
                every = self._keep_every
                doomed = [self._directory / str(n) for n in old if not every or n % every]
                for path in doomed:
                    _remove(path)
        except Exception as error:
            raise self._failure(step, error) from error
        try:
            storage.of(self._directory).publish()
            for path in doomed:
                storage.of(path).removed(path)
        except BrtError as error:
            self._last_step, self._failed = None, True
            raise CheckpointError(
                f"saving step {step} to {self._directory} failed: {error}"
            ) from error

    def _write_apart(self, step: int, parts: list[shards.Part]) -> dict[str, str]:
        """Writes and uploads the shards of this process.

        The first process then merges the stores of all processes into one (`shards.merge`), and
        returns the checksums of the files of all processes. The other processes return {}.
        """
        partial, place = self._directory / f"{step}.partial", storage.of(self._directory)
        if processes.is_first():  # The bucket may have an earlier checkpoint of this step.
            place.removed(self._directory / str(step))
        # The name is random, so that no other trainer uses the same one.
        name = processes.from_first(secrets.token_hex(4), "checkpoint name")
        own = shards.directory_of(jax.process_index(), name)
        shards.write(partial / STATE / own, parts)
        place.upload(partial, self._directory / str(step))
        sums = processes.gather("checkpoint files", json.dumps(manifest.checksums(partial)))
        if not processes.is_first():
            shutil.rmtree(partial)
            return {}
        base = place.kvstore(self._directory / str(step) / STATE)
        parts_of = [shards.directory_of(index, name) for index in range(len(sums))]
        for path, content in shards.merge(base, parts_of).items():
            (partial / STATE / path).parent.mkdir(exist_ok=True)
            (partial / STATE / path).write_bytes(content)
        return {name: digest for one in sums for name, digest in untrusted.parse_json(one).items()}

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        """Removes the files of a failed save, and returns an error that says why it failed."""
        if moved := self._moved():
            # The array store may have created the directories again, so they are removed.
            _discard(self._directory / f"{step}.partial")
            for place in (self._directory, self._directory.parent):
                with contextlib.suppress(OSError):
                    place.rmdir()
            return moved
        error = _system_error(error)
        # The free space is measured before the files of the failed save are removed, so that the
        # message says how full the disk was.
        shortage = durable.describe_shortage(self._directory, error)
        free = durable.free_space(self._directory, error)
        _discard(self._directory / f"{step}.partial")
        self._last_step, self._failed = None, True
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if durable.is_full(error):
            cause = f"{shortage} ({free}); make room, then run again"
        elif isinstance(error, OSError) and durable.storage_fails(error):
            where = f" ({error.filename})" if error.filename else ""
            cause = f"{error.strerror or error}{where}; see to the disk, then run again"
        return CheckpointError(f"saving step {step} to {self._directory} failed: {cause}")


def _system_error(error: Exception) -> Exception:
    """Returns the OSError that an error of the array store quotes, or the error itself."""
    quoted = re.search(r"\[os_error_code='(\d+)'", str(error))
    full = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else 0
    code = int(quoted[1]) if quoted else full
    return error if isinstance(error, OSError) or not code else OSError(code, os.strerror(code))


def _commit(partial: Path) -> None:
    """Renames a complete checkpoint to its step; replaces a damaged checkpoint of this step."""
    final = partial.with_suffix("")
    if final.exists() or final.is_symlink():
        _remove(final)
    partial.rename(final)
    durable.sync(final.parent)


def _remove(path: Path) -> None:
    """Removes a checkpoint; it is renamed first, so that no reader sees it half removed."""
    doomed = path.with_name(f"{path.name}.deleted")
    path.rename(doomed)
    _delete(doomed)


def _discard(partial: Path) -> None:
    """Removes the files of a failed save."""
    # Orbax stops at the first array that fails, while writes of other arrays are still running and
    # may create the directory again. There is no way to wait for these writes, so the directory is
    # polled until it is no longer created again.
    shutil.rmtree(partial, ignore_errors=True)
    for _ in range(_LATE_LOOKS):
        time.sleep(_LATE_SECONDS)
        if not partial.exists():
            return
        shutil.rmtree(partial, ignore_errors=True)


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _clean(directory: Path) -> None:
    """Removes files that a killed run left behind, but renames a checkpoint that is complete."""
    # In reverse order, 9.partial comes before 9.deleted. A complete new checkpoint is therefore
    # renamed to 9 before the old checkpoint 9 is deleted.
    for path in sorted(directory.iterdir(), reverse=True):
        if not re.fullmatch(r"[0-9]+\.(partial|deleted)", path.name):
            continue
        unnamed = path.suffix == ".partial" and not os.path.exists(path.with_suffix(""))
        if unnamed and not path.is_symlink() and not manifest.verify(path):
            _commit(path)
        else:
            _delete(path)
