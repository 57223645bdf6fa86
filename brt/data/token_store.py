"""Token stores: the tokens of the documents of a split on disk, with counts and a manifest.

A store is a directory:

    tokens.bin      the tokens of all documents; little-endian uint8, uint16 or uint32
    rows.npz        offsets, int64 [documents + 1]
                    bytes, characters, words, lost: int64 [documents]
                    names, a JSON list in UTF-8
                    spans (for pairs and conversations), int64 [spans, 3]: document, start and stop
                    of the scored tokens
    manifest.json   counts, settings and hashes; written last

Documents are encoded chunk by chunk. The chunks of several documents are encoded together, so that
all cores are used for short documents, too. While a thread encodes some chunks, the caller's thread
reads the next ones.

Until the store is complete, its content is in the files of a separate directory, so that a process
that is killed loses only the last documents:

    tokens.bin     the tokens of all documents
    counts.bin     int64 [documents, 5]: tokens, bytes, characters, words and lost bytes
    names.jsonl    the name of each document as JSON
    digests.bin    the SHA-256 of the text of each document, 32 bytes
    spans.bin      the spans, int64 [spans, 3]
    progress.json  the sizes of these files at the last commit (a flush to the disk), and counts

If that directory has a file progress.json, a new writer cuts the other files to the sizes that
progress.json names, and appends further documents.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from brt import durable, untrusted
from brt.data import chat, lost_bytes, manifests, stores
from brt.data.documents import Document, Pair
from brt.data.stores import OnDisk
from brt.data.tokenizers import Tokenizer
from brt.errors import DataError

BATCH = 1 << 20  # About this number of characters is encoded at a time.

# In UTF-8, bytes below 128 are ASCII characters. This table maps ASCII whitespace, as `str.split`
# knows it, to a space, and all other bytes to "x".
_WORD_TABLE = bytes(32 if i < 128 and chr(i).isspace() else ord("x") for i in range(256))
_WIDE_SPACE = re.compile(
    "[" + "".join(c for c in map(chr, range(128, 0x10000)) if c.isspace()) + "]"
)


class Chunk(NamedTuple):
    """A part of a document: a text, or a special token. An empty document is one empty chunk."""

    name: str | None  # the name of the document if this is its first chunk
    text: str
    ids: np.ndarray = np.zeros(0, np.int32)  # the tokens, int32 [T], once they are known
    scored: bool | None = None  # True in a completion, False in a prompt, None if all is scored


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Chunk]:
    """Yields the chunks of documents with their tokens, in order."""
    running: deque[tuple[list[Chunk], Future]] = deque()
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        for batch in _batches(documents, tokenizer):
            texts = [chunk.text for chunk in batch]
            running.append((batch, pool.submit(tokenizer.encode_chunks, texts)))
            # A batch is yielded when the next one has been submitted. The last batch is empty, so
            # all batches with chunks are yielded.
            if len(running) > 1:
                chunks, future = running.popleft()
                for chunk, ids in zip(chunks, future.result(), strict=True):
                    yield chunk if len(chunk.ids) else chunk._replace(ids=np.asarray(ids, np.int32))


def _batches(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[list[Chunk]]:
    """Yields chunks in lists of about `BATCH` characters, and [] at the end.

    The first chunk of each document has the name of the document.
    """
    batch: list[Chunk] = []
    size = 0
    for document in documents:
        name: str | None = document.name
        for chunk in itertools.chain(_chunks(document, tokenizer), [Chunk(None, "")]):
            if chunk.text or len(chunk.ids) or name is not None:
                batch.append(chunk._replace(name=name))
            name = None
            size += len(chunk.text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
    yield []


def _chunks(document: Document, tokenizer: Tokenizer) -> Iterator[Chunk]:
    """Yields the chunks of a document, with None as their `name`.

    Special tokens are chunks without text.
    """
    if document.parts is None:
        yield from (Chunk(None, text) for text in tokenizer.cut(document.chunks) if text)
        return
    parts: Iterable[tuple[str | int, bool]]
    if isinstance(document.parts, Pair):
        parts = zip(document.parts, (False, True), strict=True)
    else:
        try:
            parts = chat.answers(tokenizer, document.parts)
        except DataError as error:
            raise DataError(f"{document.name}: {error}") from error
    for part, scored in parts:
        if isinstance(part, int):
            yield Chunk(None, "", np.array([part], np.int32), scored)
        else:
            cut = tokenizer.cut([part])
            yield from (Chunk(None, text, scored=scored) for text in cut if text)


class Counter:
    """Counts and hashes a document while its chunks are written.

    Tokens are counted in the whole document. UTF-8 bytes, code points, words (as `str.split` finds
    them) and lost bytes are counted only in the text that is scored.
    """

    def __init__(self, name: str, tokenizer: Tokenizer):
        self.name = name
        self.tokens = self.bytes = self.characters = self.words = 0
        # True if the previous chunk ended inside of a word, whose rest must not count again.
        self._in_word = False
        self._counter, self._digest = lost_bytes.LostBytes(tokenizer), hashlib.sha256()
        self._spans: list[list[int]] = []
        self._is_special = False  # True if the last chunk is a special token

    def add(self, text: str, ids: np.ndarray, scored: bool | None = None) -> int:
        """Takes the next chunk (`scored` as in `Chunk`); returns its number of UTF-8 bytes."""
        data = text.encode()
        self._digest.update(data)
        self.tokens += len(ids)
        self._is_special = not text
        if scored is False:
            self._in_word = False
            return len(data)
        if scored and self._spans and self._spans[-1][1] == self.tokens - len(ids):
            self._spans[-1][1] = self.tokens
        elif scored:
            self._spans.append([self.tokens - len(ids), self.tokens])
        if text:
            self._counter.add(data, ids)
            self.bytes += len(data)
            self.characters += len(text)
            self.words += count_words(text, data) - (self._in_word and not text[0].isspace())
            self._in_word = not text[-1].isspace()
        return len(data)

    def end(self, writer: "Writer") -> None:
        # The last span is extended by the position after the last token, so that the end token is
        # scored there. If the text itself ends with a special token, the span is not extended.
        if self._spans and not self._is_special:
            self._spans[-1][1] += 1
        writer.add_spans(self._spans)
        row = Row(self.tokens, self.bytes, self.characters, self.words, self._counter.lost)
        writer.end_document(self.name, row, self._digest.digest(), self._counter.unknown)


def count_words(text: str, data: bytes) -> int:
    """Returns `len(text.split())`; computing it from the text's UTF-8 bytes `data` is faster."""
    if len(text) < len(data) and _WIDE_SPACE.search(text):
        return len(text.split())
    marked = data.translate(_WORD_TABLE)
    return marked.count(b" x") + marked.startswith(b"x")


TOKENS, COUNTS, NAMES, DIGESTS = "tokens.bin", "counts.bin", "names.jsonl", "digests.bin"
SPANS = "spans.bin"
PROGRESS = "progress.json"
COMMIT = 64 << 20  # After about this number of bytes of text, the files are committed.
_FILES = (TOKENS, COUNTS, NAMES, DIGESTS, SPANS)
_DIGEST = 32
_KIND = {"documents": int, "bytes": int, "unknown": int, "sizes": dict.fromkeys(_FILES, int)}


class Row(NamedTuple):
    """The counts of a document; except `tokens`, they count only the text that is scored."""

    tokens: int
    bytes: int  # number of bytes of the text in UTF-8
    characters: int  # Unicode code points
    words: int  # separated by whitespace
    lost: int  # bytes that the tokens do not reproduce


class Commit(NamedTuple):
    """What is certain to be on the disk: numbers of documents, of bytes and of unknown tokens."""

    documents: int = 0
    bytes: int = 0
    unknown: int = 0
    sizes: Mapping[str, int] = {}  # maps the name of each file to its size in bytes


def committed(directory: Path) -> Commit | None:
    """Returns the last commit in a directory of a `Writer`, or None if it cannot be used.

    This is so if it is missing or damaged, or if a data file is shorter than the commit says.
    """
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
    """Appends documents to the files of an unfinished token store, after its last commit.

    `documents` is the number of documents; `bytes` and `unknown` are the numbers of bytes and of
    unknown tokens in them.
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

    def add_spans(self, spans: list[list[int]]) -> None:
        """Appends spans [start, stop] of the document that the next `end_document` ends."""
        rows = [[self.documents, *span] for span in spans]
        self._files[SPANS].write(np.array(rows, "<i8").tobytes())

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

    def finish(self, tokens: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Closes the writer, moves the tokens to `tokens`, and returns counts, names and spans.

        The counts are int64 [documents, 5], with a column for each field of `Row`; the names are a
        list in JSON, uint8 [bytes]; the spans are int64 [spans, 3], as in spans.bin.
        """
        self.close()
        counts = np.fromfile(self._directory / COUNTS, "<i8").reshape(-1, len(Row._fields))
        lines = (self._directory / NAMES).read_bytes().removesuffix(b"\n")
        names = np.frombuffer(b"[" + lines.replace(b"\n", b", ") + b"]", np.uint8)
        (self._directory / TOKENS).rename(tokens)
        spans = np.fromfile(self._directory / SPANS, "<i8").reshape(-1, 3).astype(np.int64)
        return counts.astype(np.int64), names, spans


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore(stores.Store):
    """Tokenized documents on disk.

    The fingerprint is the SHA-256 of the tokens, the offsets, the spans and the tokenizer, but not
    of the names.
    """

    tokens: OnDisk | np.ndarray  # uint [tokens], of all documents; read when indexed
    offsets: np.ndarray  # int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]]
    bytes: np.ndarray  # int64 [documents], of the UTF-8 text
    characters: np.ndarray  # int64 [documents], Unicode code points
    words: np.ndarray  # int64 [documents], separated by whitespace, as PG-19 counts them
    names: tuple[str, ...]
    lost: np.ndarray  # int64 [documents], bytes of the text that the tokens do not reproduce
    # int64 [spans, 3]: a document, and the start and stop of tokens in it that are scored; None if
    # all tokens are scored. The end token is scored if the position after the text is in a span.
    spans: np.ndarray | None = None
    # The id of the end token, which readers add to documents unless spans leave it out; -1 for none
    end_id: int = -1

    @classmethod
    def open(cls, directory: Path | str, *, verify: bool = True) -> "TokenStore":
        """Opens the store in a directory; `verify` compares the files with their hashes."""
        with stores.opened(directory, facts=_FACTS, what="token store", verify=verify) as files:
            manifest, columns = files.manifest, files.columns
            dtype, offsets = stored_dtype(manifest), columns["offsets"]
            tokens = files.on_disk("tokens.bin", dtype, offsets, "documents").values
            if (
                manifest["tokens"] != len(tokens)
                or not 0 <= manifest["bos_id"] < manifest["vocab_size"]
            ):
                raise ValueError("tokens.bin has another size than its manifest says")
            spans = _checked_spans(columns["spans"], offsets) if "spans" in columns else None
            columns = {name: columns[name] for name in (*_COLUMNS, "names")}
            files.check("documents", *(columns[name] for name in columns if name != "offsets"))
        return cls(
            directory=files.directory, manifest=manifest, tokens=tokens, spans=spans, **columns
        )

    @property
    def bos_id(self) -> int:
        """Id of the token that is the input before the first token of a document."""
        return self.manifest["bos_id"]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, with the end token if any, int64 [documents]."""
        return np.diff(self.offsets) + (self._have_ends if self.end_id >= 0 else 0)

    @functools.cached_property
    def _have_ends(self) -> np.ndarray:
        """True for each document to which an end token can be added, bool [documents]."""
        have = np.full(len(self), self.spans is None)
        if self.spans is not None:
            document, _, stop = self.spans.T
            have[document[stop > np.diff(self.offsets)[document]]] = True
        return have

    @property
    def scored_counts(self) -> np.ndarray:
        """Number of the tokens of each document that are scored, int64 [documents]."""
        if self.spans is None:
            return self.lengths
        document, start, stop = self.spans.T
        sizes = np.minimum(stop, self.lengths[document]) - start
        return np.bincount(document, sizes, len(self)).astype(np.int64)

    def mask(self, document: int) -> np.ndarray:
        """Returns True for the tokens of a document that are scored, bool [tokens]."""
        return self.scored(np.array(document), np.arange(self.lengths[document]))

    def scored(self, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Returns a bool array that is True for tokens that are scored.

        `document` has the index of each token's document, and `position` the index of the token in
        this document. The shapes of the two arrays are broadcast.
        """
        if self.spans is None:
            return np.ones(np.broadcast_shapes(document.shape, position.shape), bool)
        # `place` is an index among the positions of all documents. A document of n tokens has n + 1
        # positions, because an end token may follow.
        owner, start, stop = self.spans.T
        first = self.offsets[owner] + owner
        place = self.offsets[document] + document + position
        span = np.searchsorted(first + start, place, side="right") - 1
        return (span >= 0) & (place < (first + stop)[np.maximum(span, 0)])

    @property
    def lost_bytes(self) -> int:
        """Number of bytes of all documents that the tokens do not reproduce."""
        return int(self.lost.sum())

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

    If writing is interrupted, the directory has no manifest and cannot be opened. Callers therefore
    write to a temporary directory of `manifests.atomic_directory`.

    Args:
      settings: further entries of the manifest, such as the sources.
      progress: called with the number of UTF-8 bytes of each chunk.
      partial: a directory for the files of the unfinished store (see `Writer`). Documents that
        these files contain already are not tokenized again. None uses a directory in `directory`.
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
        counts, names, spans = writer.finish(directory / "tokens.bin")
    if partial is None:
        shutil.rmtree(place)
    lengths, *others = counts.T
    columns = dict(zip(_COLUMNS, [np.r_[0, np.cumsum(lengths)], *others], strict=True))
    facts = {
        "texts": ["names"],
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
    if len(spans):
        columns["spans"] = spans
    identity = columns["offsets"].astype("<i8").tobytes() + tokenizer.fingerprint.encode()
    identity += spans.astype("<i8").tobytes()
    stores.finish(
        directory, {"names": names, **columns}, facts, files=("tokens.bin",), identity=identity
    )
    return TokenStore.open(directory, verify=False)


def _write_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    writer: Writer,
    progress: Callable[[int], Any],
) -> None:
    document: Counter | None = None
    for chunk in encode(documents, tokenizer):
        if chunk.name is not None:
            if document:
                document.end(writer)
            document = Counter(chunk.name, tokenizer)
        assert document
        writer.add_tokens(chunk.ids)
        progress(document.add(chunk.text, chunk.ids, chunk.scored))
    if document:
        document.end(writer)


def _checked_spans(spans: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns spans; raises ValueError unless they ascend, and lie inside of the documents."""
    well_formed = spans.dtype == np.int64 and spans.ndim == 2 and spans.shape[1] == 3
    document, start, stop = spans.T if well_formed else np.zeros((3, 0), np.int64)
    inside = (document >= 0) & (document < len(offsets) - 1) & (start >= 0) & (start < stop)
    if not well_formed or not inside.all() or (stop > np.diff(offsets)[document] + 1).any():
        raise ValueError("its spans lie outside of the documents")
    first, last = offsets[document] + document + start, offsets[document] + document + stop
    if (first[1:] < last[:-1]).any():
        raise ValueError("its spans do not ascend")
    return spans


_COLUMNS = ("offsets", "bytes", "characters", "words", "lost")
_FACTS = {
    **dict.fromkeys(("documents", "tokens", "bytes", "characters", "words"), int),
    "lost_bytes": int, "unknown_tokens": int,
    "vocab_size": int, "bos_id": int, "dtype": str, "tokenizer": {"fingerprint": str},
}  # fmt: skip
_DTYPES = {"|u1": 1 << 8, "<u2": 1 << 16, "<u4": 1 << 32}


def ids_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest little-endian unsigned dtype for ids below `vocab_size`."""
    return np.dtype(next(name for name, limit in _DTYPES.items() if vocab_size <= limit))


def stored_dtype(manifest: Mapping[str, Any]) -> np.dtype:
    """Returns the dtype of tokens that a manifest names; raises ValueError for other dtypes."""
    if manifest["dtype"] not in _DTYPES:
        raise ValueError(f"dtype is {manifest['dtype']!r}, none of {', '.join(_DTYPES)}")
    return np.dtype(manifest["dtype"])
