"""What of a directory in Hugging Face's format is neither used nor kept, in notes for the user."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from brt.data import originals
from brt.interop.huggingface import files, unread

_SHOWN = 12  # A note names at most this number of files or keys.
# These keys of generation_config.json are applied, or have no influence on the text.
_APPLIED = {
    "bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p",
    "transformers_version", "use_cache", "cache_implementation",
}  # fmt: skip


def of_files(directory: Path, kept: Collection[str]) -> list[str]:
    """Returns notes about the files of a directory that are neither used nor kept.

    Args:
      directory: the directory.
      kept: the names of the files that are kept or read, except for the weights.
    """
    used = {*kept, *files.weight_files(directory), *originals.MODEL}
    used |= {name.split("/")[0] for name in kept}
    found = (path.name + "/" * path.is_dir() for path in directory.iterdir())
    rest = sorted(name for name in found if name.removesuffix("/") not in used)
    notes = [f"not used and not kept: {_list(rest)}"] if rest else []
    if files.INDEX in rest:
        notes.append(
            f"there are two sets of weights; {files.FILE} is read, as in transformers, and not "
            f"{files.INDEX}"
        )
    return notes


def of_config(config: Mapping[str, Any], left: Collection[str], *, kept: bool) -> list[str]:
    """Returns notes about the keys of a config.json that brt ignores.

    Args:
      config: the content of config.json.
      left: the keys that nothing has read.
      kept: True if an export gives the keys back; otherwise, all of them are named.
    """
    names = unread.unknown(config, left) if kept else [n for n in left if config[n] is not None]
    what = "ignored, but kept" if kept else "not used and not kept"
    return [f"config.json: {what}: {_list(names)}"] if names else []


def of_generation(content: Mapping[str, Any], applied: Collection[str], *, kept: bool) -> list[str]:
    """Returns notes about the keys of a generation_config.json that brt does not apply.

    Args:
      content: the content of generation_config.json.
      applied: further keys that brt applies.
      kept: True if an export gives the keys back.
    """
    known = {*_APPLIED, *applied}
    rest = [
        f"{name} = {value!r:.40}"
        for name, value in content.items()
        if name not in known and not name.startswith("_") and value not in (None, False, [], {})
    ]
    what = "kept for exports, but not applied" if kept else "not applied and not kept"
    return [f"generation_config.json: {what}: {_list(rest)}"] if rest else []


def _list(names: list[str]) -> str:
    """Returns names in quotes as far as they have unusual characters, at most `_SHOWN` of them."""
    shown = [name if name.isprintable() and len(name) < 120 else f"{name!r:.120}" for name in names]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
