"""Finds, verifies and restores checkpoints, which are directories `checkpoints/<step>/`.

    state/            the arrays, written by orbax
    frozen/           arrays that no step changes, if there are any; see `brt.checkpointing.writer`
    meta.json         step, seed, position in the data, config, and other values of the trainer
    MANIFEST.sha256   checksums of all these files

A checkpoint is written to `<step>.partial` and renamed when it is complete. A killed run may
therefore leave files to delete, but no checkpoint that is half written. Checksums are verified
before anything is read. If the newest checkpoint is damaged, a warning says so, and the newest
intact one is used. A checkpoint may be a symbolic link to a directory. The file
last_checkpoint.txt, next to the directory `checkpoints`, names the step that was saved last, so
that a run whose checkpoints were removed does not begin again unnoticed.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging as absl_logging

from brt import output, runtime, storage, tree_utils, untrusted
from brt.checkpointing import manifest
from brt.errors import CheckpointError, NonFiniteError

_THREADS = 4  # This number of arrays is read at a time.


def read_onto_devices(path: Path, stored: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, after a child process with limited memory has read them.

    `path` is the directory `state` or `frozen`. `stored` maps the name of each array to read to an
    object with its shape, dtype and sharding; an array without a sharding is put onto the default
    device. ValueError is raised if an array is missing, or has another shape, dtype or encoding.
    """
    described = {name: ([*leaf.shape], np.dtype(leaf.dtype).name) for name, leaf in stored.items()}
    # Orbax does not store arrays without elements.
    manifest.check_arrays(
        path, {name: described[name] for name, leaf in stored.items() if leaf.size}
    )
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def read_one(name: str) -> jax.Array:
        leaf = stored[name]
        sharding = getattr(leaf, "sharding", None) or default
        if not leaf.size:
            return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), sharding)
        array = manifest.open_array(path, name, *described[name])
        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda part: array[part].read().result(), dtype=leaf.dtype
        )

    with ThreadPoolExecutor(_THREADS, "arrays") as pool:
        return dict(zip(stored, pool.map(read_one, stored), strict=True))


# The version of the checkpoint format. It changes if arrays or settings are stored in another way
# or get other names.
FORMAT = 4
META = "meta.json"
# This file contains the step that was saved last, even if its checkpoint has been removed since.
LAST = "last_checkpoint.txt"
STATE, FROZEN = "state", "frozen"
_META = {"step": int, "arrays": {str: {"dtype": str, "shape": [int]}}, "frozen?": [str]}
_DTYPES = {"bool", "bfloat16", "float16", "float32", "float64"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
_LAST_BYTES = 1 << 10  # At most this many bytes of last_checkpoint.txt are read.
_SHOWN = 3  # An error names at most this many problems.

# Orbax logs every save and restore. The filter suppresses these messages, because brt itself
# reports what users need to know.
absl_logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)


class VerifiedCheckpoint(NamedTuple):
    """A checkpoint whose checksums are right."""

    step: int  # number of completed training steps, and name of the checkpoint's directory
    meta: dict[str, Any]  # the content of meta.json
    problems: list[str]  # a sentence about each damaged checkpoint that is newer than this one
    requested: int | None = None  # the step that `find` was asked for; None for the newest
    state: Any = None  # pytree of the checkpoint's arrays; None before `restore` has read them


# In the functions below, `directory` is the directory `checkpoints` of a run.


def present(directory: Path) -> list[int]:
    """Returns the steps of all checkpoints whose directory is not empty, oldest first.

    Damaged and incomplete checkpoints are included.
    """
    try:
        names = [name for name in os.listdir(directory) if re.fullmatch(r"0|[1-9][0-9]*", name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be listed: {error.strerror}; make it readable (chmod u+rwx), or "
            "see to the disk"
        ) from error
    paths = [directory / name for name in names]
    return sorted(int(p.name) for p in paths if p.is_symlink() or _has_content(p))


def steps(directory: Path) -> list[int]:
    """Returns the steps of complete checkpoints, oldest first; checksums are not verified."""
    paths = {step: directory / str(step) / manifest.NAME for step in present(directory)}
    return [step for step, path in paths.items() if os.path.isfile(path)]


def verify(directory: Path, step: int) -> list[str]:
    """Verifies the checksums of a checkpoint; returns a phrase for each problem."""
    path = directory / str(step)
    if path.is_symlink() and not os.path.isdir(path):
        return [f"it is a link to {os.readlink(path)}, where no directory is"]
    try:
        meta = read_meta(directory, step)
    except CheckpointError as error:
        # Only meta.json says how large the other files may be, so they are not read without it.
        return manifest.verify(path, {META}) or [str(error)]
    size = tree_utils.required_bytes(tree_utils.abstract(meta["arrays"]))
    storage.of(path).fetch(path)
    problems = manifest.verify(path, arrays=size)
    if not problems and meta["step"] != step:
        problems = [f"{META} is of step {meta['step']}"]
    return problems


def read_meta(directory: Path, step: int) -> dict[str, Any]:
    """Returns the content of a checkpoint's meta.json, without verifying checksums.

    The content is the metadata that the trainer saved, with these entries added: `step`, `format`,
    `arrays` (the dtype and shape of each array) and, if arrays are frozen, `frozen` (their names).
    """
    path = directory / str(step) / META
    try:
        meta = untrusted.read_json(path, {})
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    check_json(meta, _META, str(path))
    for name, entry in meta["arrays"].items():
        if min(entry["shape"], default=0) < 0 or entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{path}: arrays: {name} is {entry}, which no array is")
    return meta


def check_json(content: Any, schema: Any, where: str) -> None:
    """Raises CheckpointError if `content`, JSON of the file `where`, violates `schema`."""
    try:
        untrusted.check(content, schema)
    except ValueError as error:
        raise CheckpointError(f"{where} is not as brt writes it: {error}") from error


def last_saved(directory: Path) -> int | None:
    """Returns the step that was saved last, even if its checkpoint has been removed since.

    The result is None if no step was saved.
    """
    path = directory.parent / LAST
    try:
        text = untrusted.read_file(path, _LAST_BYTES).strip()
        if not re.fullmatch(rb"\d{1,18}", text):
            raise ValueError("it holds no step")
        return int(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def warn_on_stderr(message: str) -> None:
    output.say(f"warning: {message}")


def find(
    directory: Path,
    step: int | None = None,
    *,
    warn: Callable[[str], None] = warn_on_stderr,
    warned: Collection[str] = (),
) -> VerifiedCheckpoint:
    """Verifies checksums, and returns the newest intact checkpoint, or the checkpoint of `step`.

    `warn` is called with a sentence about every damaged checkpoint that is passed over. `warned`
    has sentences that are not repeated: the `problems` of an earlier result. CheckpointError is
    raised if no such checkpoint is intact, or if it has the format of another version of brt.
    """
    problems: dict[int, str] = {}
    # Every round of the loop lists the directory again, because a trainer may be removing old
    # checkpoints at the same time.
    while True:
        # While a trainer replaces its only checkpoint, a listing may show neither the old nor the
        # new one. If nothing is listed, the directory is therefore listed a second time.
        storage.of(directory).refresh()
        listed = present(directory) or present(directory)
        candidates = [s for s in listed if s not in problems and step in (None, s)]
        if not candidates:
            raise CheckpointError(_no_checkpoint(directory, step, listed, problems))
        newest = candidates[-1]
        try:
            damage = verify(directory, newest)
            meta = read_meta(directory, newest) if not damage else {}
        except CheckpointError as error:
            damage = [str(error)]
        if not damage:
            if (found := meta.get("format")) != FORMAT:
                raise CheckpointError(
                    f"checkpoint {newest} of {directory} has format {found!r:.40}, and this "
                    f"version of brt reads format {FORMAT}; start a new run, or use the version "
                    "that wrote it (see provenance.json)"
                )
            for problem in problems.values():
                if problem not in warned:
                    warn(f"{directory}: {problem}; trying the next older one")
            return VerifiedCheckpoint(newest, meta, list(problems.values()), step)
        storage.of(directory).refresh()
        if newest in present(directory):
            problems[newest] = f"checkpoint {newest} is damaged: {join(damage)}"


def restore(
    directory: Path,
    target: Any = None,
    step: int | None = None,
    *,
    checkpoint: VerifiedCheckpoint | None = None,
    partial: bool = False,
) -> VerifiedCheckpoint:
    """Reads a checkpoint with its arrays, which are restored bit by bit.

    Args:
      target: pytree of `jax.ShapeDtypeStruct` or of arrays. It has the structure of the result,
        and the shape, dtype and sharding of each array. An array whose sharding is None is
        restored to the default device. A `target` of None restores all arrays to the default
        device, as a dictionary from names to arrays.
      step: the argument of `find`, which is called if `checkpoint` is None or is removed meanwhile.
      checkpoint: an earlier result of `find`; its checksums are not verified again.
      partial: True if the checkpoint may have arrays that `target` lacks; these are not read.

    Raises:
      CheckpointError: no checkpoint is intact, or its arrays do not match `target`.
      NonFiniteError: an array holds NaN or infinity, which no trainer saves.
      Exception: there is not enough memory; `brt.runtime.exhausted` recognizes such errors.
    """
    while True:
        checkpoint = checkpoint or find(directory, step)
        where, meta = f"checkpoint {checkpoint.step} of {directory}", checkpoint.meta
        tree = tree_utils.abstract(meta["arrays"]) if target is None else target
        leaves = tree_utils.named(tree)
        differences = tree_utils.differences(
            meta["arrays"], tree_utils.describe(leaves), partial=partial
        )
        if differences:
            raise CheckpointError(f"{where} is of another model or optimizer: {join(differences)}")
        try:
            stored = directory / str(checkpoint.step)
            arrays = _read_arrays(stored, leaves, meta.get("frozen", ()))
        # JAX raises this error if the memory of a device is full.
        except jax.errors.JaxRuntimeError:
            raise
        # For damaged files, tensorstore raises errors of many classes, so all are caught.
        except Exception as error:
            if runtime.exhausted(error):
                raise
            storage.of(directory).refresh()
            if checkpoint.step in present(directory):
                raise CheckpointError(
                    f"the arrays of {where} cannot be read: {error}; choose another"
                ) from error
            # A trainer removed the checkpoint while it was read, so the loop looks for another one.
            checkpoint = None
            continue
        if bad := tree_utils.not_finite(arrays):
            raise NonFiniteError(
                f"{where} cannot be used: NaN or infinity is in {join(bad)}; choose another"
            )
        state = jax.tree.unflatten(jax.tree.structure(tree), arrays.values())
        return checkpoint._replace(state=state)


def _has_content(path: Path) -> bool:
    try:
        return bool(os.listdir(path))
    # A trainer may have removed the directory since it was listed.
    except (FileNotFoundError, NotADirectoryError):
        return False
    # A checkpoint that cannot be listed is damaged. It counts as present, so that `verify` reports
    # the damage.
    except OSError:
        return True


def _read_arrays(
    directory: Path, leaves: Mapping[str, Any], frozen: Collection[str]
) -> dict[str, jax.Array]:
    parts: dict[str, dict[str, Any]] = {STATE: {}, FROZEN: {}}
    for name, leaf in leaves.items():
        parts[FROZEN if name in frozen else STATE][name] = leaf
    arrays = {}
    for part, stored in parts.items():
        arrays |= read_onto_devices(directory / part, stored)
    return {name: arrays[name] for name in leaves}


def _no_checkpoint(
    directory: Path, step: int | None, listed: list[int], problems: Mapping[int, str]
) -> str:
    if step is not None and problems:
        return f"{directory}: {problems[step]}; choose another of {listed}"
    if step is not None and listed:
        return f"{directory} has no checkpoint of step {step}; it has {listed}"
    if problems:
        return f"{directory} holds no whole checkpoint: {'; '.join(problems.values())}"
    if not os.path.isdir(directory):
        return f"there are no checkpoints, because {directory} does not exist; is --workdir right?"
    return f"there is no complete checkpoint in {directory}; is --workdir right?"


def join(phrases: list[str]) -> str:
    """Returns the first three phrases, joined by "; ", and the number of the remaining phrases."""
    more = [f"and {len(phrases) - _SHOWN} more"] if len(phrases) > _SHOWN else []
    return "; ".join([*phrases[:_SHOWN], *more])
