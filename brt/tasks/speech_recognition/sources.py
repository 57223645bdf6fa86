"""Reads and hashes the sources of speech: files of several kinds, and generated utterances.

The docstring of the class `brt.config.Speech` lists the kinds and their names in the config.

An .npz file has features and transcripts of many utterances. The array `features` [frames,
features] has the frames of all utterances one after another. The arrays `lengths` (numbers of
frames), `ids`, `transcripts` and, optionally, `speakers` have an element for each utterance.

A table (.tsv) has a line for each wav file. The header names the columns `file` and `transcript`,
and optionally `speaker` and `split`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from brt import config, untrusted
from brt.data import contents, sources
from brt.data import generated as made_up
from brt.data.rows.tables import unique
from brt.data.sources import File, FileHash
from brt.errors import DataError
from brt.tasks.speech_recognition import filter_bank, generated, kaldi
from brt.tasks.speech_recognition.utterances import Recording

NEEDED_ARRAYS = ("features", "lengths", "ids", "transcripts")
KINDS = {"features": "fiu", "lengths": "iu", "ids": "Uiu", "transcripts": "U", "speakers": "Uiu"}
NEEDED_COLUMNS = ("file", "transcript")


def recordings(names: Sequence[str], speech: config.Speech) -> Iterator[Recording]:
    """Yields the utterances of all sources in order; the features of each are read later."""
    for name in names:
        if name.startswith(made_up.PREFIX):
            yield from generated.recordings(name)
        elif _is_table(name):
            yield from table_recordings(name, speech)
        elif Path(name).is_dir():
            yield from kaldi.recordings(Path(name), speech)
        else:
            yield from array_recordings(_array_file(name))


def hashes(names: Sequence[str]) -> list[FileHash]:
    """Returns the name, size and hash of every file of some sources.

    A table of wav files has a further entry with the hash of its selected rows, and a generated
    source has an entry instead of files.
    """
    file_hashes = []
    for name in names:
        if name.startswith(made_up.PREFIX):
            file_hashes.append(FileHash(name, 0, generated.digest(name)))
            continue
        if _is_table(name):
            text = json.dumps(table_rows(name))
            digest = hashlib.sha256(text.encode()).hexdigest()
            file_hashes.append(FileHash(name, len(text), digest))
        file_hashes += [sources.hashed(File(str(path), path)) for path in _files(name)]
    return file_hashes


def left_out(name: str) -> str:
    """Names the files of a directory that are not read in a sentence; "" if all are read."""
    path = Path(name)
    return sources.left_out(name, (), kaldi.files(path)) if path.is_dir() else ""


def _files(name: str) -> list[Path]:
    if _is_table(name):
        return table_files(name)
    path = Path(name)
    return kaldi.files(path) if path.is_dir() else [_array_file(name)]


def _is_table(name: str) -> bool:
    return parse_table(name)[0].suffix == ".tsv"


def _array_file(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise DataError(f"{name} does not exist")
    if path.suffix != ".npz":
        raise DataError(
            f"{name} is no source of speech: that is a .npz file, a .tsv table of wav files, a "
            "Kaldi-style directory, or generated:NAME/COUNT"
        )
    return path


def array_recordings(path: Path) -> Iterator[Recording]:
    """Yields the utterances of an .npz file, in the order of its arrays."""
    arrays = _arrays(path)
    features, lengths = arrays["features"], arrays["lengths"]
    count = lengths.shape[:1]
    if features.ndim != 2 or any(x.shape != count for k, x in arrays.items() if k != "features"):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise DataError(
            f"{path} does not hold features (frames, width) and one length, id and transcript "
            f"of each utterance, but {shapes}"
        )
    if len(lengths) and not (0 <= lengths.min() and lengths.max() <= len(features)):
        raise DataError(
            f"a length of {path} is below 0 or above the {len(features):,} frames of its features"
        )
    ends = np.cumsum(lengths.astype(np.int64))
    if len(lengths) and ends[-1] != len(features):
        raise DataError(
            f"the lengths of {path} add up to {ends[-1]:,} frames, its features have "
            f"{len(features):,}"
        )
    speakers = arrays.get("speakers", np.full(len(lengths), ""))
    for i, end in enumerate(ends):
        frames = features[end - lengths[i] : end]
        yield Recording(
            str(path), str(arrays["ids"][i]), str(speakers[i]), str(arrays["transcripts"][i]),
            partial(_loaded_frames, frames),
        )  # fmt: skip


def _loaded_frames(frames: np.ndarray) -> tuple[np.ndarray, int]:
    return frames, 0


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with untrusted.npz(path) as file:
            existing = ", ".join(file)
            missing = [name for name in NEEDED_ARRAYS if name not in file]
            for name in KINDS.keys() & file.keys():
                if file[name].dtype.kind not in KINDS[name]:
                    raise ValueError(f"{name} is of {file[name].dtype}")
            if not missing:
                return {name: file[name].read() for name in KINDS if name in file}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no .npz file of plain arrays ({error})") from error
    raise DataError(f"{path} has no array {missing[0]!r}; it has {existing}")


def parse_table(source: str) -> tuple[Path, str]:
    """Returns the path and the split in the name of a source, PATH.tsv[:SPLIT].

    The split selects rows of the table; it is "" for the whole table.
    """
    path, _, split = source.rpartition(":")
    path, split = (path, split) if path.endswith(".tsv") else (source, "")
    return Path(path), split


def table_recordings(source: str, speech: config.Speech) -> Iterator[Recording]:
    """Yields the utterances of a table, to whose directory the paths of wav files are relative."""
    table, _ = parse_table(source)
    for row in table_rows(source):
        path = table.parent / row["file"]
        yield Recording(
            str(path), row["file"], row.get("speaker") or "", row["transcript"],
            partial(filter_bank.read, path, speech),
        )  # fmt: skip


def table_files(source: str) -> list[Path]:
    """Returns the paths of the wav files that the rows of a source name."""
    return [parse_table(source)[0].parent / row["file"] for row in table_rows(source)]


def table_rows(source: str) -> list[dict[str, str]]:
    """Returns the rows of a source, PATH.tsv[:SPLIT]: those with SPLIT in the column `split`."""
    path, split = parse_table(source)
    lines = contents.small_text(path).replace("\r\n", "\n").split("\n")
    columns, *values = [line.split("\t") for line in lines if line] or [[]]
    unique(str(path), columns)
    for name in (*NEEDED_COLUMNS, "split") if split else NEEDED_COLUMNS:
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
