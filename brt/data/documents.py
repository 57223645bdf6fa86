"""Documents, streamed: a name and its text in chunks, so that a book may exceed the memory."""

import codecs
import gzip
import lzma
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedIOBase
from typing import NamedTuple

from brt import untrusted
from brt.config.fields import MEMORY
from brt.data import records, sources
from brt.data.memory import documents as memory
from brt.data.quarantine import BadRecord, Quarantine
from brt.data.sources import File
from brt.errors import DataError

CHUNK = 1 << 20  # bytes read at a time
ZSTD_CHUNK = 1 << 10  # of zstd's, which may become 32 MiB


class Document(NamedTuple):
    """One text. `chunks` can be read once, before the next document is asked for."""

    name: str
    chunks: Iterator[str]


def read(
    names: Sequence[str],
    *,
    text_field: str = "text",
    errors: str = "strict",
    max_bytes: int = untrusted.LARGEST,
    bad: Quarantine | None = None,
) -> Iterator[Document]:
    """Yields the documents of the sources (see `brt.data.sources`) in order.

    Text is kept as it is, newlines included; only a byte order mark at the start is dropped.

    Args:
      text_field: the field of a JSONL line, a JSON record or a TFDS example.
      errors: "replace" reads bytes that are not UTF-8, and NULs, as U+FFFD.
      max_bytes: of a record, and of a text that comes out of a compressed file.
      bad: takes what is damaged; files of text are then read once more, ahead.

    Raises:
      DataError: names the file and what is wrong with it; while chunks are read, too.
    """
    bad = Quarantine() if bad is None else bad
    for source in names:
        if source.startswith("tfds:"):
            for name, text in records.tfds(source, field=text_field, errors=errors, bad=bad):
                yield Document(name, _pieces(text))
            continue
        if source.startswith(MEMORY):
            for name, text in memory.documents(source):
                yield Document(name, iter([text]))
            continue
        for file in sources.files(source):
            yield from _read_file(file, text_field, errors, max_bytes, bad)


def _read_file(
    file: File, field: str, errors: str, max_bytes: int, bad: Quarantine
) -> Iterator[Document]:
    name, how = file.path.name, {"field": field, "errors": errors, "max_bytes": max_bytes}
    for ending in sources.COMPRESSED:
        name = name.removesuffix(ending)
    if name.endswith(".jsonl"):
        yield from _records(file, records.jsonl(file, content(file), bad=bad, **how), bad)
    elif ".array_record" in name:
        yield from _records(file, records.array_record(file, bad=bad, **how), bad)
    else:
        packed = name != file.path.name

        def text() -> Iterator[str]:
            data = content(file)
            data = no_more_than(max_bytes, file.name, data) if packed else data
            return _with_text(file.name, _text(file, data, errors))

        if not bad.most or bad.tried(lambda: deque(text(), maxlen=0), file.name) is not None:
            yield Document(file.name, text())


def _records(file: File, pairs: Iterator[tuple], bad: Quarantine) -> Iterator[Document]:
    """Those of a file, up to where it is damaged."""
    found = False
    try:
        for document, text in pairs:
            found = True
            yield Document(document, _pieces(text))
        if not found and not bad.knows(file.name):
            raise records.no_text(file.name)
    except BadRecord as error:
        bad.take(error, file.name)


def _pieces(text: str) -> Iterator[str]:
    """A record in parts, of which what counts and encodes them holds one at a time."""
    return (text[start : start + CHUNK] for start in range(0, len(text) or 1, CHUNK))


def no_more_than(max_bytes: int, name: str, data: Iterable[bytes]) -> Iterator[bytes]:
    """The same; raises DataError for a few bytes that become a flood."""
    size = 0
    for chunk in data:
        size += len(chunk)
        if size > max_bytes:
            raise records.too_large(name, max_bytes)
        yield chunk


def _with_text(name: str, chunks: Iterable[str]) -> Iterator[str]:
    """The same chunks; refuses a document of nothing but whitespace."""
    blank = True
    for chunk in chunks:
        blank = blank and not chunk.strip()
        yield chunk
    if blank:
        raise records.no_text(name)


def _text(file: File, data: Iterable[bytes], errors: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset = 0  # of the first byte that the decoder has not turned into text yet
    first, characters = True, 0
    for chunk in _ended(data):
        pending = decoder.getstate()[0]
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            bad = (pending + chunk)[error.start]
            raise records.undecodable(file.name, offset + error.start, bad) from error
        offset += len(pending) + len(chunk) - len(decoder.getstate()[0])
        if text:
            text = records.without_nul(file.name, text, errors, characters)
            yield text.removeprefix("\ufeff") if first else text
            first, characters = False, characters + len(text)


def _ended(data: Iterable[bytes]) -> Iterator[bytes]:
    """Non-empty chunks, then an empty one."""
    yield from filter(None, data)
    yield b""


def content(file: File) -> Iterator[bytes]:
    """The decompressed bytes of a file."""
    try:
        with open(file.path, "rb") as raw:
            yield from _decompressed(file, raw)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise BadRecord(
            f"{file.name} is truncated or damaged ({error}); fetch or compress it again"
        ) from error
    except OSError as error:
        raise DataError(f"{file.name} cannot be read: {error.strerror}") from error


def _decompressed(file: File, raw: BufferedIOBase) -> Iterator[bytes]:
    match file.path.suffix:
        case ".zst":
            yield from _zstd(file, raw)
        case ".gz":
            yield from _reads(gzip.GzipFile(fileobj=raw))
        case ".xz":
            yield from _reads(lzma.LZMAFile(raw))
        case _:
            yield from _reads(raw)


def _reads(stream: BufferedIOBase) -> Iterator[bytes]:
    while data := stream.read(CHUNK):
        yield data


def _zstd(file: File, raw: BufferedIOBase) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{file.name} needs a library: pip install zstandard") from error
    try:
        frame = zstandard.ZstdDecompressor().decompressobj()
        while data := raw.read(ZSTD_CHUNK):
            while data:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data
    except zstandard.ZstdError as error:
        raise EOFError(error) from error
    if not frame.eof:
        raise EOFError("the last frame has no end")
