"""Records of JSON: a line each (.jsonl, .ndjson), or the members of an array (.json).

A file of the ending .json may hold either, or one object, whose first line tells.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import contents, endings, plain_text
from brt.data.quarantine import BadRecord
from brt.data.walk import File

PEEK = 1 << 16  # bytes that tell what a .json file is


class Record(NamedTuple):
    """A value of a file.

    Attributes:
      name: file:line, or file[place] of a member of an array.
      number: the line, counted from one; the place, from zero.
      problem: what is wrong where there is no value, as "is not JSON".
    """

    name: str
    number: int
    value: Any
    problem: str = ""


def read(
    file: File, *, errors: str = "strict", max_bytes: int = untrusted.LARGEST
) -> Iterator[Record]:
    """The records of a file; empty lines are none.

    Args:
      errors: "replace" reads bytes that are not UTF-8, and half surrogates, as U+FFFD; "strict"
        leaves the latter to whoever reads the text that has one (see `plain_text.problem`).
      max_bytes: of a line, or of a file that is read as a whole.

    Raises:
      BadRecord: a file that is read as a whole is no JSON, or holds neither array nor object.
      DataError: a line or a file is too large, or cannot be read.
    """
    numbered = _numbered(file, max_bytes)
    if endings.kind(file.path.name) == "json" and (first := next(numbered, None)):
        numbered = itertools.chain([first], numbered)
        if not _is_line(first[1]):
            yield from _members(file, (line for _, line in numbered), errors, max_bytes)
            return
    for number, line in numbered:
        yield parse(f"{file.name}:{number}", number, line, errors)


def lines(file: File) -> Iterator[Record]:
    """The records of a file of JSON lines, whatever it is called; raises as `read` does."""
    for number, line in _numbered(file, untrusted.LARGEST):
        yield parse(f"{file.name}:{number}", number, line)


def _numbered(file: File, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, counted from one."""
    found = contents.lines(file.name, contents.text(file), max_bytes)
    return ((i, line) for i, line in enumerate(found, 1) if line and not line.isspace())


def parse(name: str, number: int, data: bytes, errors: str = "strict") -> Record:
    """The record that some bytes are."""
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
    """What is wrong with bytes that are not UTF-8."""
    return f"is not UTF-8 at byte {error.start} (0x{error.object[error.start]:02x})"


def holds_records(file: File) -> bool:
    """Whether a .json file of a directory is a table: no single object, as a package.json is.

    What cannot be read is taken for one, so that reading it says what is wrong.
    """
    try:
        head = next(contents.content(file), b"")[:PEEK].removeprefix(b"\xef\xbb\xbf").lstrip()
    except BadRecord:
        return True
    line, end, _ = head.partition(b"\n")
    return not head.startswith(b"{") or (_is_line(line) if end else len(head) == PEEK)


def _is_line(line: bytes) -> bool:
    """Whether a line is an object of its own."""
    return line.lstrip(b"\xef\xbb\xbf \t\r").startswith(b"{") and not parse("", 1, line).problem


def _members(file: File, lines: Iterator[bytes], errors: str, max_bytes: int) -> Iterator[Record]:
    data = b"\n".join(contents.no_more_than(max_bytes, file.name, lines))
    whole = parse(file.name, 0, data, errors)
    if whole.problem:
        raise BadRecord(f"{file.name} {whole.problem}")
    values = whole.value if isinstance(whole.value, list) else [whole.value]
    for place, value in enumerate(values):
        yield Record(f"{file.name}[{place}]", place, value)
