"""Reads the records of JSON files.

The records of a .jsonl or .ndjson file are its lines. A .json file may contain JSON lines, an array
whose members are the records, or a single object; the first line shows which.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import contents, endings, plain_text
from brt.data.quarantine import BadRecord
from brt.data.walk import File

PEEK = 1 << 16  # At most this number of bytes is examined to find out what a .json file contains.


class Record(NamedTuple):
    """A JSON value in a file, or the reason why the value cannot be read."""

    name: str  # FILE:LINE, or FILE[INDEX] for a member of an array
    number: int  # the line, counted from one, or the index, counted from zero
    value: Any  # None if the value cannot be read
    problem: str = ""  # why the value cannot be read, such as "is not JSON"


def read(
    file: File, *, errors: str = "strict", max_bytes: int = untrusted.LARGEST
) -> Iterator[Record]:
    """Yields the records of a file; empty lines are skipped.

    With `errors` = "replace", bytes that are not UTF-8, and surrogates without a partner, are read
    as U+FFFD. With "strict", bytes that are not UTF-8 are a problem of the record, but surrogates
    stay in the value; `plain_text.problem` detects them. A .json file that is parsed at once and is
    not JSON raises BadRecord, and a line or such a file of more than `max_bytes` DataError.
    """
    numbered = _numbered(file, max_bytes)
    if endings.kind(file.path.name) == "json" and (first := next(numbered, None)):
        numbered = itertools.chain([first], numbered)
        if not _is_line(first[1]):
            yield from _members(file, (line for _, line in numbered), errors, max_bytes)
            return
    for number, line in numbered:
        yield parse(f"{file.name}:{number}", number, line, errors)


def json_lines(file: File) -> Iterator[Record]:
    """Yields the records of a file of JSON lines, whatever the suffix of the file is."""
    for number, line in _numbered(file, untrusted.LARGEST):
        yield parse(f"{file.name}:{number}", number, line)


def _numbered(file: File, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the number, counted from one, and the bytes of every line that is not empty."""
    all_lines = contents.lines(file.name, contents.text(file), max_bytes)
    return ((i, line) for i, line in enumerate(all_lines, 1) if line and not line.isspace())


def parse(name: str, number: int, data: bytes, errors: str = "strict") -> Record:
    """Returns a record with the JSON in `data`, or with a `problem`; `errors` is that of `read`."""
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
    """Returns a phrase such as "is not UTF-8 at byte 7 (0xff)", or that the bytes are no text."""
    text = error.object.decode("utf-8", "replace")
    if fault := plain_text.binary(plain_text.unreadable(text), len(text)):
        return fault
    return f"is not UTF-8 at byte {error.start} (0x{error.object[error.start]:02x})"


def holds_records(file: File, part: bytes | None = None) -> bool:
    """Returns False if a .json file is a single object, unless its beginning contains `part`."""
    # Files such as package.json contain a single object. A damaged file counts as a file of
    # records, so that reading the file reports the damage.
    try:
        head = next(contents.content(file), b"")[:PEEK].removeprefix(b"\xef\xbb\xbf").lstrip()
    except BadRecord:
        return True
    if part and part in head:
        return True
    line, end, _ = head.partition(b"\n")
    return not head.startswith(b"{") or (_is_line(line) if end else len(head) == PEEK)


def _is_line(line: bytes) -> bool:
    return line.lstrip(b"\xef\xbb\xbf \t\r").startswith(b"{") and not parse("", 1, line).problem


def _members(file: File, lines: Iterator[bytes], errors: str, max_bytes: int) -> Iterator[Record]:
    data = b"\n".join(contents.no_more_than(max_bytes, file.name, lines))
    record = parse(file.name, 0, data, errors)
    if record.problem:
        raise BadRecord(f"{file.name} {record.problem}")
    values = record.value if isinstance(record.value, list) else [record.value]
    for place, value in enumerate(values):
        yield Record(f"{file.name}[{place}]", place, value)
