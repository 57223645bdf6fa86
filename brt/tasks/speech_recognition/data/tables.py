"""Reads tables of wav files: .tsv files with a line for each wav file.

The header names the columns `file` and `transcript`, and optionally `speaker` and `split`.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from brt import config
from brt.data import contents
from brt.data.rows.tables import unique
from brt.errors import DataError
from brt.tasks.speech_recognition.data import filter_bank
from brt.tasks.speech_recognition.data.utterances import Recording

NEEDED = ("file", "transcript")


def parse(source: str) -> tuple[Path, str]:
    """Returns the path and the split in the name of a source, PATH.tsv[:SPLIT].

    The split selects rows of the table; it is "" for the whole table.
    """
    path, _, split = source.rpartition(":")
    path, split = (path, split) if path.endswith(".tsv") else (source, "")
    return Path(path), split


def recordings(source: str, speech: config.Speech) -> Iterator[Recording]:
    """Yields the utterances of a table, to whose directory the paths of wav files are relative."""
    table, _ = parse(source)
    for row in rows(source):
        path = table.parent / row["file"]
        yield Recording(
            str(path), row["file"], row.get("speaker") or "", row["transcript"],
            partial(filter_bank.read, path, speech),
        )  # fmt: skip


def files(source: str) -> list[Path]:
    """Returns the paths of the wav files that the rows of a source name."""
    return [parse(source)[0].parent / row["file"] for row in rows(source)]


def rows(source: str) -> list[dict[str, str]]:
    """Returns the rows of a source, PATH.tsv[:SPLIT]: those with SPLIT in the column `split`."""
    path, split = parse(source)
    lines = contents.small_text(path).replace("\r\n", "\n").split("\n")
    columns, *values = [line.split("\t") for line in lines if line] or [[]]
    unique(str(path), columns)
    for name in (*NEEDED, "split") if split else NEEDED:
        if name not in columns:
            raise DataError(f"{path} has no column {name!r}; it has {', '.join(columns)}")
    for number, row in enumerate(values, 2):
        if len(row) != len(columns):
            raise DataError(f"{path}:{number} has another number of columns than the header")
    named = [dict(zip(columns, row, strict=True)) for row in values]
    if not split:
        return named
    chosen = [row for row in named if row["split"] == split]
    if not chosen:
        splits = ", ".join(sorted({row["split"] for row in named}))
        raise DataError(f"{path} has no row of the split {split!r}; it has {splits}")
    return chosen
