"""Reads the decompressed bytes and the lines of files that may be compressed."""

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

CHUNK = 1 << 20  # This number of bytes is read from a file at a time.
# Only this number of compressed bytes is read from a zstd file at a time, because even these may
# expand to 32 MiB.
ZSTD_CHUNK = 1 << 10


def text(file: File) -> Iterator[bytes]:
    """Yields the decompressed bytes of a text file in parts.

    It raises BadRecord about damage and about files that are not text, such as PDFs.
    """
    if endings.kind(file.path.name) == "html":
        raise containers.markup(file.name)
    return refuse_containers(file.name, content(file))


def small_text(path: Path) -> str:
    """Returns the whole text of a small file, decompressed if its suffix says so.

    It raises BadRecord about damage and about bytes that are not UTF-8, and DataError if the file
    is missing, too large or not regular.
    """
    try:
        untrusted.open_file(path).close()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    name = str(path)
    data = no_more_than(untrusted.LARGEST, name, text(File(name, path)))
    return "".join(plain_text.read(name, data))


def refuse_containers(name: str, data: Iterable[bytes]) -> Iterator[bytes]:
    """Yields bytes unchanged; raises BadRecord if they begin like a file that is not text."""
    head, left = b"", iter(data)
    for chunk in left:
        head += chunk
        if len(head) >= containers.HEAD:
            break
    containers.refuse(name, head[: containers.HEAD])
    yield head
    yield from left


def content(file: File) -> Iterator[bytes]:
    """Yields the decompressed bytes of a file of any kind in parts; BadRecord about damage."""
    try:
        with open(file.path, "rb") as raw:
            yield from _decompressed(file, raw)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise BadRecord(
            f"{file.name} is truncated or damaged ({error}); fetch or compress it again, or take "
            f"{endings.compression_suffix(file.path.name)} off its name if it is not compressed"
        ) from error
    except OSError as error:
        raise DataError(f"{file.name} cannot be read: {error.strerror}") from error


def no_more_than(max_bytes: int, name: str, data: Iterable[bytes]) -> Iterator[bytes]:
    """Yields bytes unchanged; raises DataError if they are more than `max_bytes`."""
    # The limit protects against compressed files that expand to a huge size.
    size = 0
    for chunk in data:
        size += len(chunk)
        if size > max_bytes:
            raise too_large(name, max_bytes)
        yield chunk


def lines(name: str, data: Iterable[bytes], max_bytes: int = untrusted.LARGEST) -> Iterator[bytes]:
    """Yields the lines of data without newlines; after a final newline, an empty line is last."""
    parts: list[bytes] = []  # The list has the parts of the present line that were read so far.
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
    return DataError(
        f"{name} is larger than {max_bytes:,} bytes; split it, or raise Data.max_document_bytes if "
        "it is a document"
    )


def _decompressed(file: File, raw: BufferedIOBase) -> Iterator[bytes]:
    match endings.compression_suffix(file.path.name):
        case ".zst" | ".zstd":
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
