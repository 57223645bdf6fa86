"""Where a run goes on, and what it may change."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import tree_utils
from brt.checkpointing import reader
from brt.config import Config
from brt.config.fields import settings
from brt.config_io import FIELDS, SECTION_TYPES, config_from_json, difference, unknown_name
from brt.errors import CheckpointError, ConfigError
from brt.training.state import TrainState
from brt.training.workdir import Workdir
from brt.untrusted import NUMBER

PROVENANCE = {"config_changes?": [{"step": int, "changed": [str], "allowed": [str]}]}
_METER = {
    "tokens_seen": int, "steps": int,
    **dict.fromkeys(("nats", "tokens", "norms"), NUMBER),
    "others": {str: NUMBER}, "skipped?": int, "usual?": [[NUMBER]],
}  # fmt: skip
_MODEL = {"config": {str: dict}, "tokenizer": str, "provenance?": PROVENANCE}
_RUN = {**_MODEL, "seed": int, "data": {"step": int}, "meter": _METER}


def find(
    directory: Path, step: int | None = None, *, told: Collection[str] = (), resumed: bool = False
) -> reader.Found:
    """The newest whole checkpoint that a trainer has saved, or that of `step`.

    Args:
      told: see `reader.find`.
      resumed: training goes on from it, which needs more than a model and its config.

    Raises:
      CheckpointError: as `reader.find`; or its metadata are not those of a trainer.
    """
    found = reader.find(directory, step, told=told)
    where = f"{directory / str(found.step) / reader.META}"
    reader.check_json(found.meta, _RUN if resumed else _MODEL, where)
    if resumed:
        usual = found.meta["meter"].get("usual", [])
        if any(len(pair) != 2 for pair in usual) or found.meta["data"]["step"] < 0:
            raise CheckpointError(f"{where} has a step below 0, or losses without their steps")
    return found


def newest(path: Path, told: Collection[str] = ()) -> reader.Found | None:
    """The newest whole checkpoint of a workdir, None where none was ever saved.

    Args:
      told: of which damaged ones people know; see `reader.find`.

    Raises:
      CheckpointError: none is whole, or all that were saved are gone.
    """
    directory = Workdir(path).checkpoints
    found = find(directory, told=told, resumed=True) if reader.present(directory) else None
    last = reader.last_saved(directory)
    if last is None or (found and last <= found.step):
        return found
    if not found:
        raise CheckpointError(
            f"{path} was saved at step {last}, but there is no checkpoint in {directory}; put "
            "them back, or choose another --workdir to train anew"
        )
    if not found.problems:  # those were told of
        reader.warn_on_stderr(f"checkpoint {last} is gone from {directory}; using {found.step}")
    return found


def may_change(name: str) -> bool:
    """Whether a resumed run may change the field `Section.name`; others make another run."""
    section, _, field = name.partition(".")
    return settings(SECTION_TYPES[section])[field].resume


def check_resumable(
    saved: Config, wanted: Config, allowed: Collection[str] | None = None
) -> list[str]:
    """Describes what differs from the checkpoint's config.

    Args:
      allowed: fields that may differ although that makes another run of it; None where nothing is
        to be trained.

    Raises:
      ConfigError: a difference that makes another run of it.
    """
    differences = difference(saved, wanted)
    fixed = {
        name: f"{name} was {old!r} and is {new!r}"
        for name, old, new in differences
        if not may_change(name) and name not in (allowed or ())
    }
    if fixed:
        flags = " ".join(f"--allow_config_change={name}" for name in fixed)
        anyway = "" if allowed is None else f"; to go on with it as another run, add {flags}"
        raise ConfigError(
            f"this workdir holds another run: {'; '.join(fixed.values())}; set it back, or choose "
            f"another --workdir{anyway}"
        )
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in differences]


class Change(NamedTuple):
    """What a run goes on with that is not what its checkpoint was made with.

    Attributes:
      lines: every difference, in words.
      allowed: the fields that only a flag lets change.
    """

    lines: list[str]
    allowed: list[str]


def change(
    found: reader.Found, wanted: Config, abstract: TrainState, allowed: Collection[str]
) -> Change:
    """Compares a checkpoint with the run that is to go on from it.

    Args:
      abstract: the run's shapes.
      allowed: see `check_resumable`.

    Raises:
      ConfigError: a difference that is not allowed, or that no flag makes possible.
    """
    saved = config_from_json(found.meta["config"])
    lines = check_resumable(saved, wanted, allowed)
    names = [name for name, *_ in difference(saved, wanted) if not may_change(name)]
    arrays = tree_utils.describe(tree_utils.named(abstract))
    if names and (differences := tree_utils.differences(found.meta["arrays"], arrays)):
        raise ConfigError(
            f"{' and '.join(names)} cannot change in a run, even so: the shapes of what "
            f"is saved change with it ({reader.join(differences)}); set it back, or choose another "
            "--workdir"
        )
    return Change(lines, names)


def check_names(names: Collection[str]) -> None:
    """Raises ConfigError for one that is no field."""
    for name in names:
        if name not in FIELDS:
            raise ConfigError(f"--allow_config_change={name}: there is {unknown_name(name)}")


def history(meta: Mapping[str, Any] | None, change: Change | None) -> list[dict[str, Any]]:
    """What changed on the way to a checkpoint and since, JSON, for provenance.json."""
    if not meta or not change:
        return []
    before = meta.get("provenance", {}).get("config_changes", [])
    now = {"step": meta["step"], "changed": change.lines, "allowed": change.allowed}
    return [*before, *([now] if change.lines else [])]


def position(
    saved: Mapping[str, Any], now: Mapping[str, Any], change: Change | None
) -> dict[str, Any]:
    """Where the data go on: where they stopped, or, in another order, at the same step.

    Args:
      saved: the state of the iterator of batches in the checkpoint.
      now: that of the run's.
    """
    own = {name: value for name, value in now.items() if name not in ("step", "store")}
    return {**saved, **(own if change and change.allowed else {})}
