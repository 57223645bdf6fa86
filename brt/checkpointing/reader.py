"""Checkpoints that are whole or do not count: `checkpoints/<step>/`.

    state/            the arrays, by orbax
    meta.json         step, seed, position in the data, config: whatever the trainer gives
    MANIFEST.sha256   checksums of all of it

A save is written to `<step>.partial` and renamed when it is complete, so a killed run
leaves whole checkpoints and litter, nothing between. A checkpoint is verified before it is
read; where the newest is damaged the next older whole one is used, and said so. One may be a link
to a directory elsewhere. The file LAST beside `checkpoints` tells when these are gone.
"""

import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging as absl_logging

from brt import tree_utils, untrusted
from brt.checkpointing import arrays as stored_arrays
from brt.checkpointing import manifest
from brt.errors import CheckpointError, NonFiniteError

FORMAT = 3  # of the arrays: 2 has kernels by head, 3 optimizers' matrices heads first
_WITHOUT_OPTIMIZER = (2, FORMAT)  # whose parameters can be read
META = "meta.json"
LAST = "last_checkpoint.txt"  # the step that was saved last, also where nothing is left of it
STATE = "state"
_META = {"step": int, "arrays": {str: {"dtype": str, "shape": [int]}}}
_DTYPES = {"bool", "bfloat16", "float16", "float32", "float64"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
_FEW = 1 << 10  # bytes of a file that holds a number
_SHOWN = 3  # problems named in one sentence

# Orbax narrates every save and restore; what users need to know is said here.
absl_logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)


class Found(NamedTuple):
    """A whole checkpoint, and what was wrong with newer ones.

    Attributes:
      asked: the step that somebody asked for; None: any, the newest.
    """

    step: int
    meta: dict[str, Any]
    problems: list[str]
    asked: int | None = None


class Restored(NamedTuple):
    """A restored state, its metadata, and what was wrong with newer checkpoints."""

    step: int
    state: Any
    meta: dict[str, Any]
    problems: list[str]


def present(directory: Path) -> list[int]:
    """Steps that have something in their directory, whole or not, oldest first.

    Raises:
      CheckpointError: the directory cannot be listed.
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
    """Steps of the complete checkpoints, oldest first; not verified; raises as `present` does."""
    paths = {step: directory / str(step) / manifest.NAME for step in present(directory)}
    return [step for step, path in paths.items() if os.path.isfile(path)]


def verify(directory: Path, step: int) -> list[str]:
    """What is wrong with a checkpoint, one phrase per file; empty if it is whole."""
    path = directory / str(step)
    if path.is_symlink() and not os.path.isdir(path):
        return [f"it is a link to {os.readlink(path)}, where no directory is"]
    problems = manifest.verify(path)
    if not problems and (found := read_meta(directory, step)["step"]) != step:
        problems = [f"{META} is of step {found}"]
    return problems


def read_meta(directory: Path, step: int) -> dict[str, Any]:
    """The metadata that `save` was given, with `step`, `format` and `arrays`; not verified."""
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


def check_json(found: Any, fields: Any, where: str) -> None:
    """Raises CheckpointError where JSON is not as `untrusted.check` is told."""
    try:
        untrusted.check(found, fields)
    except ValueError as error:
        raise CheckpointError(f"{where} is not as brt writes it: {error}") from error


def last_saved(directory: Path) -> int | None:
    """The step that was saved last in a `checkpoints` directory, whether it is there or not.

    Raises:
      CheckpointError: what says so is damaged.
    """
    path = directory.parent / LAST
    try:
        text = untrusted.read_file(path, _FEW).strip()
        if not re.fullmatch(rb"\d{1,18}", text):
            raise ValueError("it holds no step")
        return int(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def warn_on_stderr(message: str) -> None:
    """Prints a warning where people see it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def find(
    directory: Path,
    step: int | None = None,
    *,
    warn: Callable[[str], None] = warn_on_stderr,
    told: Collection[str] = (),
) -> Found:
    """The newest whole checkpoint, or `step` if that is whole.

    Args:
      warn: told about every damaged checkpoint that was passed over, when there is an older one.
      told: `Found.problems` of which it was told before.

    Raises:
      CheckpointError: there is none; the one asked for is missing or damaged, or the one found
        is of an older brt.
    """
    problems: dict[int, str] = {}
    while True:  # a trainer may remove old checkpoints meanwhile, so look again every time
        # A listing taken while a trainer replaces its only checkpoint may show neither.
        there = present(directory) or present(directory)
        candidates = [s for s in there if s not in problems and step in (None, s)]
        if not candidates:
            raise CheckpointError(_nothing_found(directory, step, there, problems))
        newest = candidates[-1]
        try:
            damage = verify(directory, newest)
            found = read_meta(directory, newest) if not damage else {}
        except CheckpointError as error:
            damage = [str(error)]
        if not damage:
            _check_format(directory, newest, found)
            for problem in problems.values():
                if problem not in told:
                    warn(f"{directory}: {problem}; trying the next older one")
            return Found(newest, found, list(problems.values()), step)
        if newest in present(directory):
            problems[newest] = f"checkpoint {newest} is damaged: {join(damage)}"


def _check_format(directory: Path, step: int, meta: dict[str, Any]) -> None:
    if meta.get("format") not in _WITHOUT_OPTIMIZER:
        raise CheckpointError(
            f"checkpoint {step} of {directory} was written by an older brt (parameters before 'by "
            "head'); train anew, or read it with the brt that wrote it (its version is in "
            "provenance.json)"
        )


def restore(
    directory: Path,
    target: Any = None,
    step: int | None = None,
    *,
    found: Found | None = None,
    partial: bool = False,
    warn: Callable[[str], None] = warn_on_stderr,
) -> Restored:
    """Reads the newest whole checkpoint, or `step`, bit by bit, onto any devices.

    Args:
      directory: the `checkpoints` directory of a run.
      target: pytree of `jax.ShapeDtypeStruct` with shardings, or of arrays; without a sharding
        a leaf goes to the default device. None restores all arrays as a dictionary by name.
      step: a certain checkpoint; that one or an error.
      found: what `find` gave just now, whose checksums need not be verified again.
      partial: read only the arrays that `target` names.
      warn: told about every damaged checkpoint that was passed over.

    Raises:
      CheckpointError: nothing whole to restore, or arrays that do not fit `target`.
      NonFiniteError: an array holds NaN or infinity, which no trainer saves.
    """
    while True:
        found = found or find(directory, step, warn=warn)
        if not partial and target is not None and found.meta["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {found.step} of {directory} was written by an older brt, whose "
                "optimizers kept their moments in another order; its model can be used, but not "
                "trained on: begin a new run with Training.init_from"
            )
        tree = tree_utils.abstract(found.meta["arrays"]) if target is None else target
        wanted = tree_utils.named(tree)
        differences = tree_utils.differences(
            found.meta["arrays"], tree_utils.describe(wanted), partial=partial
        )
        if differences:
            raise CheckpointError(
                f"checkpoint {found.step} of {directory} is of another model or optimizer: "
                f"{join(differences)}"
            )
        try:
            arrays = _read_arrays(directory / str(found.step) / STATE, wanted)
        except jax.errors.JaxRuntimeError:  # of devices: their memory is full
            raise
        except Exception as error:  # orbax and tensorstore raise nothing more specific
            if found.step in present(directory):
                raise CheckpointError(
                    f"the arrays of checkpoint {found.step} of {directory} cannot be read: "
                    f"{error}; choose another"
                ) from error
            found = None  # removed by the trainer while we read it
            continue
        if bad := tree_utils.not_finite(arrays):
            raise NonFiniteError(
                f"checkpoint {found.step} of {directory} is of no use: NaN or infinity is in "
                f"{join(bad)}; choose another"
            )
        state = jax.tree.unflatten(jax.tree.structure(tree), arrays.values())
        return Restored(found.step, state, found.meta, found.problems)


def _has_content(path: Path) -> bool:
    try:
        return bool(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):  # removed by the trainer just now
        return False
    except OSError:  # damaged, and what looks into it says how
        return True


def _read_arrays(path: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    item = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default
        )
        for name, leaf in wanted.items()
    }
    stored = {name: leaf for name, leaf in item.items() if leaf.size}
    stored_arrays.check(path, stored)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(
            path.absolute(),
            args=ocp.args.PyTreeRestore(
                item=stored,
                restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
                partial_restore=True,
            ),
        )
    for name, leaf in stored.items():
        # Orbax returns the leaf that was asked for where its own metadata do not name it.
        found = arrays[name]
        if not isinstance(found, jax.Array) or (found.shape, found.dtype) != (
            leaf.shape, leaf.dtype,
        ):  # fmt: skip
            raise ValueError(f"{name} is no array of {leaf.dtype}{list(leaf.shape)} there")
    return {
        name: arrays[name]
        if leaf.size
        else jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        for name, leaf in item.items()
    }


def _nothing_found(
    directory: Path, step: int | None, there: list[int], problems: Mapping[int, str]
) -> str:
    if step is not None and problems:
        return f"{directory}: {problems[step]}; choose another of {there}"
    if step is not None and there:
        return f"{directory} has no checkpoint of step {step}; it has {there}"
    if problems:
        return f"{directory} holds no whole checkpoint: {'; '.join(problems.values())}"
    if not os.path.isdir(directory):
        return f"there are no checkpoints, because {directory} does not exist; is --workdir right?"
    return f"there is no complete checkpoint in {directory}; is --workdir right?"


def join(phrases: list[str]) -> str:
    """The first few phrases, and how many there are besides."""
    more = [f"and {len(phrases) - _SHOWN} more"] if len(phrases) > _SHOWN else []
    return "; ".join([*phrases[:_SHOWN], *more])
