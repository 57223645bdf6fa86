"""Documents out of records: JSONL lines, ArrayRecord files, TensorFlow datasets.

One record is one document and is held in memory whole: at most about four times its bytes.
"""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from brt import untrusted
from brt.data import sources
from brt.data.quarantine import BadRecord, Quarantine
from brt.data.sources import File
from brt.errors import DataError

READ_RECORDS = 64  # ArrayRecord records fetched at a time
_SHOWN = 20  # fields that a sentence names


def jsonl(
    file: File, data: Iterable[bytes], *, field: str, errors: str, max_bytes: int, bad: Quarantine
) -> Iterator[tuple]:
    """Yields (name, text) of every line of the file's content; empty lines are skipped."""
    for number, line in enumerate(lines(file.name, data, max_bytes), 1):
        if line and not line.isspace():
            name = f"{file.name}:{number}"
            read = partial(_json_text, name, line, field, errors)
            if (text := bad.tried(read, file.name, line=number)) is not None:
                yield name, text


def array_record(
    file: File, *, field: str, errors: str, max_bytes: int, bad: Quarantine
) -> Iterator[tuple]:
    """Yields (name, text) of every record: UTF-8 text, or a JSON object with `field`."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(file.path))
        count = reader.num_records()
        if count == 0:
            raise BadRecord(f"{file.name} is no ArrayRecord file, or has no record")
        for start in range(0, count, READ_RECORDS):
            for i, record in enumerate(reader.read(start, min(start + READ_RECORDS, count)), start):
                name = f"{file.name}:{i}"
                if len(record) > max_bytes:
                    raise too_large(name, max_bytes)
                is_json = record.lstrip()[:1] == b"{"
                read = partial(
                    _json_text if is_json else _plain_text, name, record, field, errors
                )  # fmt: skip
                if (text := bad.tried(read, file.name, record=i)) is not None:
                    yield name, text
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise BadRecord(f"{file.name} is damaged: {str(error).partition(';')[0]}") from error


def tfds(source: str, *, field: str, errors: str, bad: Quarantine) -> Iterator[tuple]:
    """Yields (name, text) of every example of `tfds:NAME/SPLIT`."""
    for i, example in enumerate(sources.tfds_data(source).examples):
        name = f"{source}:{i}"
        read = partial(_example_text, name, example, field, errors)
        if (text := bad.tried(read, source, record=i)) is not None:
            yield name, text


def decode(name: str, data: bytes, errors: str) -> str:
    """UTF-8 to text.

    Raises:
      DataError: the bytes are not UTF-8; says at which byte.
    """
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise undecodable(name, error.start, data[error.start]) from error


def undecodable(name: str, offset: int, byte: int) -> BadRecord:
    """The sentence about bytes that are not UTF-8."""
    return BadRecord(
        f"{name} is not UTF-8 at byte {offset} (0x{byte:02x}); convert it, or read such bytes as "
        "U+FFFD with Data.errors = 'replace'"
    )


def without_nul(name: str, text: str, errors: str, before: int = 0) -> str:
    """The same; a NUL, of which files are full that were not written to their end, is refused.

    Args:
      errors: "replace" reads it as U+FFFD.
      before: characters of the document that come before `text`.

    Raises:
      BadRecord: there is one.
    """
    if "\0" not in text:
        return text
    if errors == "replace":
        return text.replace("\0", "\ufffd")
    raise BadRecord(
        f"{name} has a NUL at character {before + text.index(chr(0))}; it may not have been "
        "written to its end: fetch it again, or read NULs as U+FFFD with Data.errors = 'replace'"
    )


def no_text(name: str) -> BadRecord:
    """The sentence about a document of nothing but whitespace."""
    return BadRecord(f"{name} has no text")


def _plain_text(name: str, data: bytes, field: str, errors: str) -> str:
    return _checked(name, _decoded(name, data, errors), errors)


def _decoded(name: str, data: bytes, errors: str) -> str:
    return decode(name, data, errors).removeprefix("\ufeff")


def _json_text(name: str, data: bytes, field: str, errors: str) -> str:
    try:
        example = untrusted.parse_json(_decoded(name, data, errors))
    except json.JSONDecodeError as error:
        raise BadRecord(f"{name} is not JSON: {error.msg} at column {error.colno}") from error
    text = _field(name, example, field)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"{name} has half a surrogate pair at character {error.start}") from error
    return _checked(name, text, errors)


def _example_text(name: str, example: Any, field: str, errors: str) -> str:
    value = _field(name, example, field)
    if isinstance(value, bytes):
        return _plain_text(name, value, field, errors)
    return _checked(name, value, errors)


def _checked(name: str, text: str, errors: str) -> str:
    if not text.strip():
        raise no_text(name)
    return without_nul(name, text, errors)


def _field(name: str, example: Any, field: str) -> Any:
    """A text, or its bytes where an example holds such."""
    if not isinstance(example, dict):
        raise BadRecord(f"{name} is no object with a field '{field}'")
    if field not in example:
        raise BadRecord(
            f"{name} has no field '{field}'; set Data.text_field to one of "
            f"{sorted(example)[:_SHOWN]}"
        )
    value = example[field]
    if not isinstance(value, str | bytes):
        raise BadRecord(f"{name}: the field '{field}' is {type(value).__name__}, not text")
    return value


def lines(name: str, data: Iterable[bytes], max_bytes: int = untrusted.LARGEST) -> Iterator[bytes]:
    """The lines of what comes in parts, without their newlines; the last may be empty.

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
