"""Where a run goes on, and what it may change."""

from pathlib import Path

from brt.checkpointing import reader
from brt.config import Config
from brt.config.fields import settings
from brt.config_io import SECTION_TYPES, difference
from brt.errors import CheckpointError, ConfigError
from brt.training.workdir import Workdir


def newest(path: Path) -> reader.Found | None:
    """The newest whole checkpoint of a workdir, None where none was ever saved.

    Raises:
      CheckpointError: none is whole, or all that were saved are gone.
    """
    directory = Workdir(path).checkpoints
    found = reader.find(directory) if reader.present(directory) else None
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


def check_resumable(saved: Config, wanted: Config) -> list[str]:
    """Describes what differs from the checkpoint's config.

    Raises:
      ConfigError: a difference that makes another run of it.
    """
    differences = difference(saved, wanted)
    fixed = [
        f"{name} was {old!r} and is {new!r}"
        for name, old, new in differences
        if not may_change(name)
    ]
    if fixed:
        raise ConfigError(
            f"this workdir holds another run: {'; '.join(fixed)}; set it back, or choose another "
            "--workdir"
        )
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in differences]
