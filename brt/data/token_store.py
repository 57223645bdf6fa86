"""Token stores: the tokens of the documents of a split on disk, with counts and a manifest.

A store is a directory:

    tokens.bin      the tokens of all documents; little-endian uint8, uint16 or uint32
    documents.npz   offsets int64 [documents + 1]; bytes, characters, words, lost: int64
                    [documents]; names, a JSON list in UTF-8
    manifest.json   counts, settings and hashes; written last

The directory is renamed into place when it is complete.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brt.data import encoding, losses, manifests
from brt.data.documents import Document
from brt.data.rows import store
from brt.data.rows.on_disk import InMemory, OnDisk
from brt.data.store_writer import Row, Writer
from brt.data.tokenizers import Tokenizer
from brt.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Tokenized documents on disk."""

    directory: Path
    manifest: Mapping[str, Any]  # counts, settings and hashes
    tokens: OnDisk | InMemory  # uint [tokens] of all documents, which are read when indexed
    offsets: np.ndarray  # int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]]
    bytes: np.ndarray  # int64 [documents], of the UTF-8 text
    characters: np.ndarray  # int64 [documents], Unicode code points
    words: np.ndarray  # int64 [documents], separated by whitespace, as PG-19 counts them
    names: tuple[str, ...]
    lost: np.ndarray | None = None  # int64 [documents], bytes that the tokens do not reproduce
    end_id: int = -1  # the id that readers add to every document as its last token; -1 for none

    @classmethod
    def open(cls, directory: Path | str, *, verify: bool = True) -> "TokenStore":
        """Opens the store in a directory; `verify` compares the files with their hashes."""
        with store.opened(
            directory, ["names"], facts=_FACTS, npz="documents.npz", what="token store",
            verify=verify,
        ) as files:  # fmt: skip
            manifest, columns = files.manifest, files.columns
            dtype, offsets = stored_dtype(manifest), columns["offsets"]
            tokens = files.on_disk("tokens.bin", dtype, offsets, "documents").values
            if (
                manifest["tokens"] != len(tokens)
                or not 0 <= manifest["bos_id"] < manifest["vocab_size"]
            ):
                raise ValueError("tokens.bin has another size than its manifest says")
            # Stores that earlier versions of brt wrote do not have the column "lost".
            lost = columns.get("lost")
            counted = (*_COLUMNS[1:], "names") if lost is None else (*_COLUMNS[1:], "names", "lost")
            files.check("documents", *(columns[name] for name in counted))
            columns = {name: columns[name] for name in ("offsets", *counted)}
        return cls(directory=files.directory, manifest=manifest, tokens=tokens, **columns)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens, the offsets and the tokenizer, but not of the names."""
        return self.manifest["fingerprint"]

    @property
    def bos_id(self) -> int:
        """Id of the token that is the input before the first token of a document."""
        return self.manifest["bos_id"]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document with its end token, int64 [documents]."""
        return np.diff(self.offsets) + (self.end_id >= 0)

    @property
    def lost_bytes(self) -> int:
        """Number of bytes of all documents that the tokens do not reproduce; 0 if not known."""
        return 0 if self.lost is None else int(self.lost.sum())

    def counted(self, tokenizer: Tokenizer) -> "TokenStore":
        """Returns the store, in which `lost` is estimated if it is None."""
        if self.lost is not None:
            return self
        sizes = enumerate(self.bytes)
        lost = [losses.estimated_loss(tokenizer, self.document(i), int(size)) for i, size in sizes]
        return dataclasses.replace(self, lost=np.array(lost, np.int64))

    def __len__(self) -> int:
        return len(self.names)

    def document(self, index: int) -> np.ndarray:
        """Returns the tokens of the text of a document, uint [tokens], without an end token."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def write(
    directory: Path | str,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int], Any] = lambda size: None,
    partial: Path | None = None,
) -> TokenStore:
    """Tokenizes documents, chunk by chunk, writes them to a new token store, and opens it.

    If writing is interrupted, the directory has no manifest and cannot be opened. Callers write to
    a temporary directory of `manifests.atomic_directory`.

    Args:
      settings: further entries of the manifest, such as the sources.
      progress: called with the number of UTF-8 bytes of each chunk.
      partial: a directory for the files of the unfinished store (see `brt.data.store_writer`),
        whose documents are not tokenized again. None uses a directory in `directory`.
    """
    directory = Path(directory)
    manifests.make_empty(directory)
    dtype = ids_dtype(tokenizer.vocab_size)
    place = partial or directory / "partial"
    with contextlib.closing(Writer(place, dtype)) as writer:
        if writer.bytes:
            progress(writer.bytes)
        left = itertools.islice(documents, writer.documents, None)
        _write_documents(left, tokenizer, writer, progress)
        if not writer.documents:
            raise DataError(f"there is no document for {directory.name}")
        counts, names = writer.finish(directory / "tokens.bin")
    if partial is None:
        shutil.rmtree(place)
    lengths, *others = counts.T
    known = (*_COLUMNS, "lost")
    columns = dict(zip(known, [np.r_[0, np.cumsum(lengths)], *others], strict=True))
    facts = {
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "dtype": dtype.str,
        "documents": len(counts),
        "tokens": int(lengths.sum()),
        **{name: int(columns[name].sum()) for name in ("bytes", "characters", "words")},
        "lost_bytes": int(columns["lost"].sum()),
        "unknown_tokens": writer.unknown,
        **(settings or {}),
    }
    identity = columns["offsets"].astype("<i8").tobytes() + tokenizer.fingerprint.encode()
    store.finish(
        directory, {"names": names, **columns}, facts, files=("tokens.bin",),
        identity=identity, npz="documents.npz",
    )  # fmt: skip
    return TokenStore.open(directory, verify=False)


def _write_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    writer: Writer,
    progress: Callable[[int], Any],
) -> None:
    document: _Document | None = None
    for chunk in encoding.encode(documents, tokenizer):
        if chunk.name is not None:
            if document:
                document.end(writer)
            document = _Document(chunk.name, tokenizer)
        assert document
        size = document.add(chunk)
        writer.add_tokens(chunk.ids)
        progress(size)
    if document:
        document.end(writer)


class _Document:
    """Counts and hashes a document while its chunks are written."""

    def __init__(self, name: str, tokenizer: Tokenizer):
        self._name, self._tokens = name, 0
        self._counter, self._losses = encoding.Counter(), losses.Losses(tokenizer)
        self._digest = hashlib.sha256()

    def add(self, chunk: encoding.Encoded) -> int:
        """Takes the next chunk, and returns its number of UTF-8 bytes."""
        data = chunk.text.encode()
        self._counter.add(chunk.text, data)
        self._losses.add(data, chunk.ids)
        self._digest.update(data)
        self._tokens += len(chunk.ids)
        return len(data)

    def end(self, writer: Writer) -> None:
        count, lost = self._counter, self._losses
        row = Row(self._tokens, count.bytes, count.characters, count.words, lost.lost)
        writer.end_document(self._name, row, self._digest.digest(), lost.unknown)


_COLUMNS = ("offsets", "bytes", "characters", "words")
_FACTS = {
    **dict.fromkeys(("documents", "tokens", "bytes", "characters", "words"), int),
    "lost_bytes?": int, "unknown_tokens?": int,
    "vocab_size": int, "bos_id": int, "dtype": str, "tokenizer": {"fingerprint": str},
}  # fmt: skip
_DTYPES = {"|u1": 1 << 8, "<u2": 1 << 16, "<u4": 1 << 32}


def ids_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest little-endian unsigned dtype for ids below `vocab_size`."""
    return np.dtype(next(name for name, limit in _DTYPES.items() if vocab_size <= limit))


def stored_dtype(manifest: Mapping[str, Any]) -> np.dtype:
    """Returns the dtype of a store's tokens, which its manifest names; ValueError for others."""
    if manifest["dtype"] not in _DTYPES:
        raise ValueError(f"dtype is {manifest['dtype']!r}, none of {', '.join(_DTYPES)}")
    return np.dtype(manifest["dtype"])
