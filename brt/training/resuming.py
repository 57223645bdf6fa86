"""What a run may change when it goes on."""

from brt.config import Config
from brt.config.fields import settings
from brt.config_io import SECTION_TYPES, difference
from brt.errors import ConfigError


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
