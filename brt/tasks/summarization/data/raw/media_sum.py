"""Reads the raw data of MediaSum (Zhu et al. 2021): transcripts of interviews.

The published files are news_dialogue.json, the transcripts with their summaries, and
train_val_test_split.json, the ids of the transcripts in each split.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brt.data.rows.tally import BadRow
from brt.errors import DataError
from brt.tasks.summarization.data.raw import examples
from brt.tasks.summarization.data.raw.examples import Example

SPLITS = ("train", "val", "test")  # The splits have these names in the raw data and in TFDS.
TEXTS = ("id", "program", "date", "url", "summary")
LISTS = ("utt", "speaker")


def read(directory: Path) -> dict[str, Iterator[Example | BadRow]]:
    """Returns the examples of each split; the file of transcripts is read once for each."""
    transcripts = examples.find(directory, "news_dialogue.json")
    path = examples.find(directory, "train_val_test_split.json")
    members = examples.json_file(path)
    if not (isinstance(members, dict) and {*SPLITS} <= {*members}):
        raise DataError(f"{path} names no {', '.join(SPLITS)}")
    return {split: _split(transcripts, {*members[split]}) for split in SPLITS}


def _split(transcripts: Path, members: set[str]) -> Iterator[Example | BadRow]:
    missing = set(members)
    for number, value in enumerate(examples.json_array(transcripts)):
        name = f"{transcripts}:{number}"
        if not isinstance(value, dict):
            yield BadRow(name, "is no JSON object")
        elif value.get("id") in members:
            missing.discard(value["id"])
            yield Example(name, value["id"], _values(value))
    for member in sorted(missing):
        yield BadRow(f"{transcripts}", f"has no transcript '{member}'")


def _values(value: dict[str, Any]) -> dict[str, Any]:
    """Returns all features; those that a transcript lacks are empty."""
    return {name: value.get(name, "") for name in TEXTS} | {n: value.get(n, []) for n in LISTS}
