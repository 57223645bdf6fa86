"""Reads the bytes, lines and JSON records of files that may be compressed.

The records of a .jsonl or .ndjson file are its lines. A .json file may contain JSON lines, an array
whose members are the records, or a single object; the first line shows which.
"""

import gzip
import itertools
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import formats, plain_text
from brt.data.quarantine import BadRecord
from brt.errors import DataError

CHUNK = 1 << 20  # This number of bytes is read from a file at a time.
# Only this number of compressed bytes is read from a zstd file at a time, because even so few
# bytes may expand to 32 MiB.
ZSTD_CHUNK = 1 << 10


class File(NamedTuple):
    """A file: its path, and the name by which messages and documents refer to it."""

    name: str
    path: Path


def text(file: File) -> Iterator[bytes]:
    """Yields the decompressed bytes of a text file in parts.

    It raises BadRecord about damage and about files that are not text, such as PDFs.
    """
    if formats.kind(file.path.name) == "html":
        raise formats.markup(file.name)
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
    head, rest = b"", iter(data)
    for chunk in rest:
        head += chunk
        if len(head) >= formats.HEAD:
            break
    formats.refuse(name, head[: formats.HEAD])
    yield head
    yield from rest


def content(file: File) -> Iterator[bytes]:
    """Yields the decompressed bytes of any file in parts; raises BadRecord if it is damaged."""
    try:
        with open(file.path, "rb") as raw:
            yield from _decompressed(file, raw)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise BadRecord(
            f"{file.name} is truncated or damaged ({error}); fetch or compress it again, or take "
            f"{formats.compression_suffix(file.path.name)} off its name if it is not compressed"
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
    """Yields lines without newlines; if the data end with a newline, the last line is empty."""
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
    return DataError(f"{name} is larger than {max_bytes:,} bytes; split it")


def _decompressed(file: File, raw: BufferedIOBase) -> Iterator[bytes]:
    match formats.compression_suffix(file.path.name):
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
        raise DataError(f"{file.name} needs a library: pip install 'brt[zstd]'") from error
    try:
        frame = zstandard.ZstdDecompressor().decompressobj()
        while data := raw.read(ZSTD_CHUNK):
            while data:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data
    except zstandard.ZstdError as error:
        raise EOFError(error) from error  # `content` reports EOFErrors as damage of the file.
    if not frame.eof:
        raise EOFError("the last frame has no end")


PEEK = 1 << 16  # At most this number of bytes is examined to find out what a .json file contains.


class Record(NamedTuple):
    """A JSON value in a file, or the reason why the value cannot be read."""

    name: str  # FILE:LINE, or FILE[INDEX] for a member of an array
    number: int  # the line, counted from one, or the index, counted from zero
    value: Any  # None if the value cannot be read
    problem: str = ""  # why the value cannot be read, such as "is not JSON"


def read_json(
    file: File, *, errors: str = "strict", max_bytes: int = untrusted.LARGEST
) -> Iterator[Record]:
    """Yields the records of a file; empty lines are skipped.

    With `errors` = "replace", bytes that are not UTF-8, and surrogates without a partner, are read
    as U+FFFD. With "strict", a record with bytes that are not UTF-8 has a `problem` and no value,
    but surrogates stay in the value; `plain_text.problem` detects them. A .json file without JSON
    lines is parsed as a whole, and raises BadRecord if it is not JSON. DataError is raised if a
    line, or a file that is parsed as a whole, has more than `max_bytes`.
    """
    numbered = _numbered(file, max_bytes)
    if formats.kind(file.path.name) == "json" and (first := next(numbered, None)):
        numbered = itertools.chain([first], numbered)
        if not _is_line(first[1]):
            yield from _members(file, (line for _, line in numbered), errors, max_bytes)
            return
    for number, line in numbered:
        yield parse_json(f"{file.name}:{number}", number, line, errors)


def _numbered(file: File, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the number, counted from one, and the bytes of every line that is not empty."""
    all_lines = lines(file.name, text(file), max_bytes)
    return ((i, line) for i, line in enumerate(all_lines, 1) if line and not line.isspace())


def parse_json(name: str, number: int, data: bytes, errors: str = "strict") -> Record:
    """Returns a record with the JSON value, or with a `problem`; `errors` is as in `read_json`."""
    halves = "replace" if errors == "replace" else "keep"
    try:
        text = data.decode("utf-8", errors).removeprefix(plain_text.MARK)
        return Record(name, number, untrusted.parse_json(text, halves=halves))
    except UnicodeDecodeError as error:
        return Record(name, number, None, not_utf8(error))
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return Record(name, number, None, f"is not JSON: {error.msg} at {line}column {error.colno}")


def not_utf8(error: UnicodeDecodeError) -> str:
    """Returns a phrase such as "is not UTF-8 at byte 7 (0xff)", or "is not text: ..."."""
    text = error.object.decode("utf-8", "replace")
    if fault := plain_text.binary(plain_text.unreadable(text), len(text)):
        return fault
    return f"is not UTF-8 at byte {error.start} (0x{error.object[error.start]:02x})"


def holds_records(file: File, part: bytes | None = None) -> bool:
    """Returns False if a .json file is a single object, unless its beginning contains `part`."""
    # Files such as package.json contain a single object. A damaged file counts as a file of
    # records, so that reading the file reports the damage.
    try:
        head = next(content(file), b"")[:PEEK].removeprefix(b"\xef\xbb\xbf").lstrip()
    except BadRecord:
        return True
    if part and part in head:
        return True
    line, end, _ = head.partition(b"\n")
    return not head.startswith(b"{") or (_is_line(line) if end else len(head) == PEEK)


def _is_line(line: bytes) -> bool:
    return (
        line.lstrip(b"\xef\xbb\xbf \t\r").startswith(b"{") and not parse_json("", 1, line).problem
    )


def _members(file: File, lines: Iterator[bytes], errors: str, max_bytes: int) -> Iterator[Record]:
    data = b"\n".join(no_more_than(max_bytes, file.name, lines))
    record = parse_json(file.name, 0, data, errors)
    if record.problem:
        raise BadRecord(f"{file.name} {record.problem}")
    values = record.value if isinstance(record.value, list) else [record.value]
    for place, value in enumerate(values):
        yield Record(f"{file.name}[{place}]", place, value)
