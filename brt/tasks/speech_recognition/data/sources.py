"""Reads and hashes the sources of speech: files of several kinds, and generated utterances.

The docstring of the class `brt.config.Speech` lists the kinds and their names in the config.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from brt import config
from brt.data import generated as made_up
from brt.data import sources
from brt.data.sources import File, FileHash
from brt.errors import DataError
from brt.tasks.speech_recognition.data import arrays, generated, kaldi, tables
from brt.tasks.speech_recognition.data.utterances import Recording


def recordings(names: Sequence[str], speech: config.Speech) -> Iterator[Recording]:
    """Yields the utterances of all sources in order; the features of each are read later."""
    for name in names:
        if name.startswith(made_up.PREFIX):
            yield from generated.recordings(name)
        elif _is_table(name):
            yield from tables.recordings(name, speech)
        elif Path(name).is_dir():
            yield from kaldi.recordings(Path(name), speech)
        else:
            yield from arrays.recordings(_array_file(name))


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
            text = json.dumps(tables.rows(name))
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
        return tables.files(name)
    path = Path(name)
    return kaldi.files(path) if path.is_dir() else [_array_file(name)]


def _is_table(name: str) -> bool:
    return tables.parse(name)[0].suffix == ".tsv"


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
