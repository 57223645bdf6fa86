"""The class of examples of published datasets, and functions that read the datasets' files."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import contents
from brt.data.rows.tally import BadRow
from brt.errors import DataError

CHUNK = 1 << 24  # This number of characters of a JSON array is read at a time.


class Example(NamedTuple):
    """An example of a published dataset, such as a document with its summary."""

    name: str  # The file and, if the file has many examples, the row; for messages.
    key: str  # different for every example of a split; TFDS needs such keys
    values: dict[str, Any]  # features by name; each is a string or a list of strings


def text(path: Path) -> str | BadRow:
    """Returns the text of a file, or a BadRow with the problem if the file cannot be read."""
    try:
        return contents.small_text(path)
    except DataError as error:
        return BadRow(str(path), str(error).removeprefix(f"{path} "))


def find(directory: Path, *names: str) -> Path:
    """Returns the path of the first of `names` that exists; raises DataError if none does."""
    for name in names:
        if (directory / name).exists():
            return directory / name
    raise DataError(f"{directory} has no {' or '.join(names)}; name the directory with --raw")


def json_file(path: Path) -> Any:
    try:
        return untrusted.parse_json(untrusted.read_file(path), halves="keep")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON file ({error})") from error


def json_array(path: Path) -> Iterator[Any]:
    """Yields the values of a JSON array one at a time, because the file may exceed the memory."""
    decoder = json.JSONDecoder()
    try:
        with open(path, encoding="utf-8") as file:
            buffer = file.read(CHUNK).lstrip()
            if not buffer.startswith("["):
                raise DataError(f"{path} is no JSON array")
            position = _next(buffer, 1)
            while buffer[position : position + 1] != "]":
                try:
                    value, end = untrusted.parse_json(
                        buffer, partial(decoder.raw_decode, idx=position), halves="keep"
                    )
                except json.JSONDecodeError as error:
                    # The buffer may end in the middle of a value, so the next chunk is appended.
                    if not (more := file.read(CHUNK)):
                        raise DataError(f"{path} is no JSON array ({error.msg})") from error
                    buffer = buffer[position:] + more
                    position = _next(buffer, 0)
                    continue
                yield value
                position = _next(buffer, end)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error


def _next(text: str, position: int) -> int:
    """Returns the position of the next value, or of the end of the array."""
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position
