"""Gives the files of the directory back that a model was read from, when it is exported.

The files are those that `brt.data.originals` keeps beside a tokenizer.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from brt import untrusted
from brt.data import originals
from brt.errors import CheckpointError
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface.config import WRITTEN

CONFIG = "config.json"
# The export of the same model, perhaps trained further, has the same values of these.
_SAME = (
    "model_type", "d_model", "num_layers", "encoder_layers", "hidden_size", "num_hidden_layers",
)  # fmt: skip


def with_settings(
    content: ExportFormat, beside: Mapping[str, bytes], own: Collection[str]
) -> ExportFormat:
    """Returns the content of the export of an encoder-decoder or an encoder, in which config.json
    and generation_config.json have all entries of the original files that the export does not
    state itself.

    Args:
      content: the content of the export.
      beside: the original files by name.
      own: keys that only the export states, even where it lacks them.
    """
    ours, theirs = content.settings[CONFIG], read_json(beside, CONFIG)
    if any(theirs.get(name) != ours[name] for name in _SAME if name in ours):
        return content
    written = {name: read_json(beside, name) for name in originals.MODEL if name in beside}
    for name, stated in content.settings.items():
        original = written.get(name, {}).items()
        rest = {key: value for key, value in original if key not in own and key not in WRITTEN}
        written[name] = {**rest, **stated}
    return content._replace(settings=written)


def write(file: tuple[str, bytes], beside: Mapping[str, bytes], target: Path) -> list[str]:
    """Writes the file of a tokenizer (name and content) and the original files `beside` it, except
    for those of the model, and returns their names.
    """
    found = {name: data for name, data in beside.items() if name not in originals.MODEL}
    found = dict([file]) | found
    for name, data in found.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(data)
    return [*found]


def read_json(beside: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Returns the content of one of the original files; {} if it is missing."""
    try:
        return untrusted.checked_json(beside.get(name, b"{}"), {})
    except ValueError as error:
        raise CheckpointError(f"{name} beside the tokenizer is damaged: {error}") from error
