"""Decides which settings may differ between a checkpoint and the run that resumes from it.

Every setting declares in `brt.config` whether a resumed run may change the setting. A run with a
change of another setting would be a different run, so the change is refused unless the user names
the setting in --allow_config_change.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from brt import tree_utils
from brt.checkpointing import reader
from brt.checkpointing.reader import VerifiedCheckpoint
from brt.config import Config
from brt.config.names import declaration, derived_fields, field_types
from brt.config_io import config_from_json, difference, unknown_name
from brt.errors import ConfigError
from brt.training.state import TrainState


class ConfigChanges(NamedTuple):
    """Differences between the config of a checkpoint and the config of the resuming run."""

    lines: list[str]  # every difference as "Section.field: old -> new"
    allowed: list[str]  # the names of those that need --allow_config_change


def may_change(name: str) -> bool:
    """Returns True if a resumed run may change a setting without --allow_config_change."""
    return declaration(name).resume


def check_names(names: Collection[str]) -> None:
    """Raises ConfigError if one of the names in --allow_config_change is not a setting."""
    for name in names:
        if name not in {*field_types(), *derived_fields()}:
            raise ConfigError(f"--allow_config_change={name}: there is {unknown_name(name)}")


def check_resumable(
    saved: Config, config: Config, allowed: Collection[str] | None = None, *, possible: bool = True
) -> list[str]:
    """Returns the differences between two configs as "Section.field: old -> new".

    Args:
      allowed: names of settings that the user allows to differ (--allow_config_change). None if the
        checkpoint is only read; in this case the error does not mention --allow_config_change.
      possible: False if not even --allow_config_change makes the differences possible.

    Raises:
      ConfigError: a setting differs that must not change, and that the user did not allow to
        change.
    """
    differences = difference(saved, config)
    refused = {
        name: f"{name} was {old!r} and is {new!r}"
        for name, old, new in differences
        if not may_change(name) and name not in (allowed or ())
    }
    if refused:
        flags = " ".join(f"--allow_config_change={name}" for name in refused)
        anyway = "" if allowed is None else f"; to continue as a different run, add {flags}"
        if not possible:
            anyway = ", where Training.init_from can name this run to start from its weights"
        raise ConfigError(
            f"this workdir holds another run: {'; '.join(refused.values())}; set it back, or "
            f"choose another --workdir{anyway}"
        )
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in differences]


def compare(
    checkpoint: VerifiedCheckpoint,
    config: Config,
    state_shapes: TrainState,
    allowed: Collection[str],
) -> ConfigChanges:
    """Returns the differences between the config of a checkpoint and that of the resuming run.

    Besides the errors of `check_resumable`, a ConfigError is raised if a change has changed the
    shapes of arrays, which not even --allow_config_change permits.
    """
    saved = config_from_json(checkpoint.meta["config"])
    names = [name for name, *_ in difference(saved, config) if not may_change(name)]
    arrays = tree_utils.describe(tree_utils.named(state_shapes))
    differences = tree_utils.differences(checkpoint.meta["arrays"], arrays)
    lines = check_resumable(saved, config, allowed, possible=not differences)
    if names and differences:
        raise ConfigError(
            f"{' and '.join(names)} cannot change in a run, not even with "
            f"--allow_config_change, because the shapes of saved arrays would change "
            f"({reader.join(differences)}); set it back, or choose another --workdir"
        )
    return ConfigChanges(lines, names)


def history(meta: Mapping[str, Any] | None, changes: ConfigChanges | None) -> list[dict[str, Any]]:
    """Returns all config changes of a run so far, as JSON for provenance.json."""
    if not meta or not changes:
        return []
    earlier = meta.get("provenance", {}).get("config_changes", [])
    now = {"step": meta["step"], "changed": changes.lines, "allowed": changes.allowed}
    return [*earlier, *([now] if changes.lines else [])]


def resumed_data_position(
    saved: Mapping[str, Any], current: Mapping[str, Any], changes: ConfigChanges | None
) -> dict[str, Any]:
    """Returns the position in the data from which a resumed run continues to read batches.

    The step is always the checkpoint's. If the user allowed changes, the entries that determine the
    order of the data (such as the seed) are taken from the new iterator's state, `current`.
    """
    order = {name: value for name, value in current.items() if name not in ("step", "store")}
    return {**saved, **(order if changes and changes.allowed else {})}
