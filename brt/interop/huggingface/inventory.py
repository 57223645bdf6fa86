"""What of a directory in Hugging Face's format is neither used nor kept, in notes for the user."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from brt.data import originals
from brt.interop.huggingface import files, unread

_SHOWN = 12  # A note names at most this number of files or keys.
# These keys of generation_config.json have no influence on the text.
_NEUTRAL = {"transformers_version", "use_cache", "cache_implementation"}


def notes(
    directory: Path, *, left: Collection[str], applied: Collection[str], used: Collection[str]
) -> list[str]:
    """Returns notes about what brt does not use of a directory, or does not keep for exports.

    Args:
      directory: the directory.
      left: the keys of config.json that nothing has read. They are kept.
      applied: the keys of generation_config.json that brt applies. The others are kept.
      used: the files that are kept or read, except for the weights and the two files of settings.
    """
    described, generation = (_read(directory / name) for name in originals.MODEL)
    unknown = unread.unknown(described, left)
    rest = [
        f"{name} = {value!r:.40}"
        for name, value in generation.items()
        if name not in applied
        and name not in _NEUTRAL
        and not name.startswith("_")
        and value not in (None, False, [], {})
    ]
    found = [f"config.json: ignored, but kept: {_list(unknown)}"] if unknown else []
    if rest:
        found.append(f"generation_config.json: kept for exports, but not applied: {_list(rest)}")
    return found + of_files(directory, {*used, *originals.MODEL})


def of_files(directory: Path, used: Collection[str]) -> list[str]:
    """Returns notes about the files of a directory that are neither weights nor among those `used`,
    that is, kept or read.
    """
    known = {*used, *files.weight_files(directory), *(name.split("/")[0] for name in used)}
    found = (path.name + "/" * path.is_dir() for path in directory.iterdir())
    rest = sorted(name for name in found if name.removesuffix("/") not in known)
    notes = [f"not used and not kept: {_list(rest)}"] if rest else []
    if files.INDEX in rest:
        notes.append(
            f"there are two sets of weights; {files.FILE} is read, as in transformers, and not "
            f"{files.INDEX}"
        )
    return notes


def _read(path: Path) -> dict[str, Any]:
    return files.read_json(path) if path.is_file() else {}


def _list(names: list[str]) -> str:
    # Names with unusual characters are put in quotes.
    shown = [name if name.isprintable() and len(name) < 120 else f"{name!r:.120}" for name in names]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
