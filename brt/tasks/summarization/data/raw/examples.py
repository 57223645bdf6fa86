"""What the readers of raw data yield, and how they read files."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import contents
from brt.data.rows.tally import BadRow
from brt.errors import DataError

CHUNK = 1 << 24  # characters of a JSON array read at a time


class Example(NamedTuple):
    """An example of a dataset.

    Attributes:
      name: file:row, or the file.
      key: differs between the examples of a split.
      values: features; str, or a list of them.
    """

    name: str
    key: str
    values: dict[str, Any]


def text(path: Path) -> str | BadRow:
    """A file's text, or what is wrong with it."""
    try:
        return contents.small(path)
    except DataError as error:
        return BadRow(str(path), str(error).removeprefix(f"{path} "))


def find(directory: Path, *places: str) -> Path:
    """The first of `places` that exists in a directory.

    Raises:
      DataError: none does.
    """
    for place in places:
        if (directory / place).exists():
            return directory / place
    raise DataError(f"{directory} has no {' or '.join(places)}; name the directory with --raw")


def json_file(path: Path) -> Any:
    """The value in a file.

    Raises:
      DataError: it is no JSON, or not UTF-8.
    """
    try:
        return untrusted.parse_json(untrusted.read_file(path), halves="keep")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON file ({error})") from error


def json_array(path: Path) -> Iterator[Any]:
    """The objects of an array, one at a time: the file may exceed the memory.

    Raises:
      DataError: it is no JSON array, or not UTF-8.
    """
    decoder = json.JSONDecoder()
    try:
        with open(path, encoding="utf-8") as file:
            buffer = file.read(CHUNK).lstrip()
            if not buffer.startswith("["):
                raise DataError(f"{path} is no JSON array")
            place = _next(buffer, 1)
            while buffer[place : place + 1] != "]":
                try:
                    value, end = untrusted.parse_json(
                        buffer, partial(decoder.raw_decode, idx=place), halves="keep"
                    )
                except json.JSONDecodeError as error:  # it may go on in the next chunk
                    if not (more := file.read(CHUNK)):
                        raise DataError(f"{path} is no JSON array ({error.msg})") from error
                    buffer = buffer[place:] + more
                    place = _next(buffer, 0)
                    continue
                yield value
                place = _next(buffer, end)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error


def _next(text: str, place: int) -> int:
    """Where the next value begins, or the array ends."""
    while place < len(text) and text[place] in " \t\r\n,":
        place += 1
    return place
