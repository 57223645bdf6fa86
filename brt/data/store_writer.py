"""Writes a token store so that a killed process loses only its last documents.

Until the store is complete, its content is in files of a directory of its own:

    tokens.bin     the tokens of all documents
    counts.bin     int64 [documents, 5]: tokens, bytes, characters, words and lost bytes
    names.jsonl    the name of each document as JSON
    digests.bin    the SHA-256 of the text of each document, 32 bytes
    progress.json  the sizes of these files at the last commit, and counts

If the directory has a file progress.json, a new writer cuts the files to the sizes that it names,
and continues there.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from brt import durable, untrusted

TOKENS, COUNTS, NAMES, DIGESTS = "tokens.bin", "counts.bin", "names.jsonl", "digests.bin"
PROGRESS = "progress.json"
COMMIT = 64 << 20  # After about this number of bytes of text, the files are committed.
_FILES = (TOKENS, COUNTS, NAMES, DIGESTS)
_DIGEST = 32
_KIND = {"documents": int, "bytes": int, "unknown": int, "sizes": dict.fromkeys(_FILES, int)}


class Row(NamedTuple):
    """The counts of a document."""

    tokens: int
    bytes: int  # in UTF-8
    characters: int  # Unicode code points
    words: int  # separated by whitespace
    lost: int  # bytes that the tokens do not reproduce


class Commit(NamedTuple):
    """What is certain to be on the disk: numbers of documents, of bytes and of unknown tokens."""

    documents: int = 0
    bytes: int = 0
    unknown: int = 0
    sizes: Mapping[str, int] = {}  # of each file in bytes, by its name


def committed(directory: Path) -> Commit | None:
    """Returns the last commit of an unfinished store; None if there is none or it is damaged."""
    try:
        found = Commit(**untrusted.read_json(directory / PROGRESS, _KIND))
        there = {name: (directory / name).stat().st_size for name in _FILES}
    except (OSError, ValueError, TypeError):
        return None
    rows = {COUNTS: 8 * len(Row._fields), DIGESTS: _DIGEST}
    whole = all(0 <= size <= there[name] for name, size in found.sizes.items()) and all(
        found.sizes[name] == size * found.documents for name, size in rows.items()
    )
    return found if whole else None


class Writer:
    """Appends documents to the files of an unfinished token store, after those of its last commit.

    `documents`, `bytes` and `unknown` are the numbers of documents, and of their bytes and unknown
    tokens.
    """

    def __init__(self, directory: Path, dtype: np.dtype):
        self._directory, self._dtype = directory, dtype
        directory.mkdir(parents=True, exist_ok=True)
        done = committed(directory) or Commit()
        self.documents, self.bytes, self.unknown = done.documents, done.bytes, done.unknown
        with contextlib.ExitStack() as stack:
            self._files: dict[str, IO] = {}
            for name in _FILES:
                file = stack.enter_context(durable.open_file(directory / name, "ab"))
                file.truncate(done.sizes.get(name, 0))
                self._files[name] = file
            self._stack = stack.pop_all()
        self._committed_bytes = self.bytes

    def add_tokens(self, ids: np.ndarray) -> None:
        """Appends tokens, int [T], of the document that the next `end_document` ends."""
        self._files[TOKENS].write(np.asarray(ids, self._dtype).data)

    def end_document(self, name: str, row: Row, digest: bytes, unknown: int) -> None:
        """Completes a document; commits the files after every `COMMIT` bytes of text."""
        self._files[COUNTS].write(np.array(row, "<i8").data)
        self._files[NAMES].write(json.dumps(name).encode() + b"\n")
        self._files[DIGESTS].write(digest)
        self.documents += 1
        self.bytes += row.bytes
        self.unknown += unknown
        if self.bytes - self._committed_bytes >= COMMIT:
            self._commit()

    def _commit(self) -> None:
        sizes = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
        done = Commit(self.documents, self.bytes, self.unknown, sizes)
        durable.write(self._directory / PROGRESS, json.dumps(done._asdict()).encode())
        self._committed_bytes = self.bytes

    def close(self) -> None:
        """Closes the files. What was written since the last commit may be lost."""
        self._stack.close()

    def finish(self, tokens: Path) -> tuple[np.ndarray, np.ndarray]:
        """Closes the writer, moves the tokens to the file `tokens`, and returns counts and names.

        The counts are int64 [documents, 5], with a column for each field of `Row`; the names are a
        list in JSON, uint8 [bytes].
        """
        self.close()
        counts = np.fromfile(self._directory / COUNTS, "<i8").reshape(-1, len(Row._fields))
        lines = (self._directory / NAMES).read_bytes().removesuffix(b"\n")
        names = np.frombuffer(b"[" + lines.replace(b"\n", b", ") + b"]", np.uint8)
        (self._directory / TOKENS).rename(tokens)
        return counts.astype(np.int64), names
