"""Reads Kaldi's data directories, which list utterances with wav files or archives of features.

Such a directory has the tables `text` (the transcript of each utterance), `wav.scp` (its wav file)
or `feats.scp` (the place of its features in an archive), and optionally `utt2spk` (its speaker).
"""

import io
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from brt import config, untrusted
from brt.data import contents
from brt.errors import DataError
from brt.tasks.speech_recognition import filter_bank
from brt.tasks.speech_recognition.utterances import Recording

BLANKS = " \t\r"
TABLES = ("text", "utt2spk", "wav.scp", "feats.scp")
_FLOATS: dict[bytes, np.dtype] = {b"FM ": np.dtype("<f4"), b"DM ": np.dtype("<f8")}


def recordings(directory: Path, speech: config.Speech) -> Iterator[Recording]:
    """Yields every utterance that the file `text` of a Kaldi data directory lists.

    The settings `speech` apply to the features of wav files. Raises DataError if a table is missing
    or lacks an utterance, or if wav.scp contains commands.
    """
    transcripts = table(directory / "text")
    speakers = table(directory / "utt2spk") if (directory / "utt2spk").exists() else {}
    places = locations(directory)
    archived = location_table(directory).name == "feats.scp"
    for id, transcript in transcripts.items():
        if id not in places:
            raise DataError(f"{directory} has no audio for {id}, which its text has")
        load = partial(_load, places[id], archived, speech)
        yield Recording(str(directory), id, speakers.get(id, ""), transcript, load)


def _load(where: str, archived: bool, speech: config.Speech) -> tuple[np.ndarray, int]:
    return (read_matrix(where), 0) if archived else filter_bank.read(Path(where), speech)


def files(directory: Path) -> list[Path]:
    """Returns the paths of the directory's tables, and of the files that the tables name."""
    existing = [directory / name for name in TABLES if (directory / name).exists()]
    archived = location_table(directory).name == "feats.scp"
    named = {
        where.rpartition(":")[0] if archived else where for where in locations(directory).values()
    }
    return [*existing, *map(Path, sorted(named))]


def location_table(directory: Path) -> Path:
    """Returns the path of the table that says where the sound or the features of utterances are:
    feats.scp if it exists, otherwise wav.scp.
    """
    for name in ("feats.scp", "wav.scp"):
        if (directory / name).exists():
            return directory / name
    raise DataError(f"{directory} has neither feats.scp nor wav.scp")


def locations(directory: Path) -> dict[str, str]:
    """Returns the place of the sound or the features of each utterance, by the utterance's id.

    A place is ARCHIVE:POSITION (a byte offset in an archive of features) if the directory has a
    feats.scp, otherwise the path of a wav file.
    """
    path = location_table(directory)
    if path.name == "wav.scp" and (directory / "segments").exists():
        raise DataError(
            f"{directory} cuts its wav files by `segments`; compute features of its utterances "
            "(feats.scp), or write a wav file of each"
        )
    places = table(path)
    for id, where in places.items():
        if where.endswith("|"):
            raise DataError(
                f"{path} has a command for {id} ({where}); brt runs none: write wav files and "
                "name them there"
            )
    return places


def table(path: Path) -> dict[str, str]:
    """Returns the values of a table by key, such as transcripts by the ids of utterances.

    The first word of each line is the key, and the rest of the line is the value.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(contents.small_text(path).split("\n"), 1):
        if not (line := line.strip(BLANKS)):
            continue
        id, *rest = re.split(f"[{BLANKS}]+", line, maxsplit=1)
        if id in values:
            raise DataError(f"{path}:{number} has {id} a second time; remove one of the lines")
        values[id] = rest[0] if rest else ""
    return values


def read_matrix(where: str) -> np.ndarray:
    """Returns a matrix of floats, [frames, features], at the place ARCHIVE:POSITION."""
    archive, _, position = where.rpartition(":")
    try:
        with untrusted.open_file(archive) as file:
            size = os.fstat(file.fileno()).st_size
            if not re.fullmatch("[0-9]{1,19}", position) or int(position) > size:
                raise ValueError(f"it has {size:,} bytes")
            file.seek(int(position))
            return _matrix(file, where, size - int(position))
    except (OSError, ValueError) as error:
        raise DataError(f"{where} holds no matrix ({error})") from error


def _matrix(file: io.BufferedReader, where: str, remaining: int) -> np.ndarray:
    start = file.read(5)
    if start[:2] != b"\0B":
        raise ValueError("it is not in Kaldi's binary format")
    if start[2:] not in _FLOATS:
        kind = start[2:].decode("ascii", "replace").strip()
        raise DataError(
            f"{where} holds a matrix of kind {kind!r}, not plain floats (FM or DM); write it "
            "again with copy-feats --compress=false"
        )
    sizes = np.frombuffer(file.read(10), np.dtype([("bytes", "i1"), ("value", "<i4")]))
    rows, columns = (int(size) for size in sizes["value"])
    dtype = _FLOATS[start[2:]]
    if min(rows, columns) < 0 or rows * columns * dtype.itemsize > remaining:
        raise ValueError(f"it ends before {rows:,} rows of {columns:,}")
    return np.frombuffer(file.read(rows * columns * dtype.itemsize), dtype).reshape(rows, columns)
