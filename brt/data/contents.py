"""The bytes of a file as its name says they are packed, and its lines."""

import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path

from brt import untrusted
from brt.data import containers, endings, plain_text
from brt.data.quarantine import BadRecord
from brt.data.walk import File
from brt.errors import DataError

CHUNK = 1 << 20  # bytes read at a time
ZSTD_CHUNK = 1 << 10  # of zstd's, which may become 32 MiB


def text(file: File) -> Iterator[bytes]:
    """The decompressed bytes of a file of text, in parts.

    Raises:
      BadRecord: it is damaged, or something else than text (see `brt.data.containers`).
      DataError: it cannot be read.
    """
    return without_containers(file.name, content(file))


def small(path: Path) -> str:
    """The text of a file that is held in memory whole, decompressed as its name says.

    Raises:
      BadRecord: it is no text in UTF-8, or damaged.
      DataError: it is missing, too large, or no regular file.
    """
    try:
        untrusted.open_file(path).close()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    name = str(path)
    data = no_more_than(untrusted.LARGEST, name, text(File(name, path)))
    return "".join(plain_text.read(name, data))


def without_containers(name: str, data: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes; raises BadRecord where they begin as no text in UTF-8 does."""
    head, left = b"", iter(data)
    for chunk in left:
        head += chunk
        if len(head) >= containers.HEAD:
            break
    containers.refuse(name, head[: containers.HEAD])
    yield head
    yield from left


def content(file: File) -> Iterator[bytes]:
    """The decompressed bytes of any file, in parts; raises as `text` does."""
    try:
        with open(file.path, "rb") as raw:
            yield from _decompressed(file, raw)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise BadRecord(
            f"{file.name} is truncated or damaged ({error}); fetch or compress it again, or take "
            f"{endings.packing(file.path.name)} off its name if it is not compressed"
        ) from error
    except OSError as error:
        raise DataError(f"{file.name} cannot be read: {error.strerror}") from error


def no_more_than(max_bytes: int, name: str, data: Iterable[bytes]) -> Iterator[bytes]:
    """The same; raises DataError for a few bytes that become a flood."""
    size = 0
    for chunk in data:
        size += len(chunk)
        if size > max_bytes:
            raise too_large(name, max_bytes)
        yield chunk


def lines(name: str, data: Iterable[bytes], max_bytes: int = untrusted.LARGEST) -> Iterator[bytes]:
    r"""The lines of what comes in parts, without the \n that ends them; the last may be empty.

    Raises:
      DataError: one is longer than `max_bytes`.
    """
    parts: list[bytes] = []  # of a line that is not complete yet
    size = number = 0
    for chunk in data:
        for i, part in enumerate(chunk.split(b"\n")):
            if i:
                whole, parts, size, number = b"".join(parts), [], 0, number + 1
                yield whole
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise too_large(f"{name}:{number + 1}", max_bytes)
    whole, parts = b"".join(parts), []
    yield whole


def too_large(name: str, max_bytes: int) -> DataError:
    """The sentence about what may not fit in memory, or never ends."""
    return DataError(
        f"{name} is larger than {max_bytes:,} bytes; cut it, or raise Data.max_document_bytes if "
        "it is a document"
    )


def _decompressed(file: File, raw: BufferedIOBase) -> Iterator[bytes]:
    match endings.packing(file.path.name):
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
