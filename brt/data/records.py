"""Reads documents that are records of JSON files, ArrayRecord files, TensorFlow datasets or tables.

Every record is a document. A record is held in memory, where it takes up to four times its size.
Each reader yields the name and the text of every record, which is in the field (or column) `field`.
`errors` is Data.errors: "replace" reads NULs and bytes that are not UTF-8 as U+FFFD; with "strict",
a text that contains them is a bad record. `bad` collects records that cannot be read.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from brt.data import contents, json_files, plain_text, sources
from brt.data.json_files import Record
from brt.data.plain_text import REPLACE
from brt.data.quarantine import BadRecord, Quarantine
from brt.data.rows import tables
from brt.data.rows.tables import Row
from brt.data.sources import File
from brt.errors import DataError

READ_RECORDS = 64  # This number of records is fetched from an ArrayRecord file at a time.
_REMEDY = "Data.columns = ('text=FIELD',)"
_SHOWN = 20  # An error message lists at most this number of fields.


def json_texts(
    file: File, *, field: str, errors: str, max_bytes: int, bad: Quarantine
) -> Iterator[tuple]:
    """Reads a JSON file (see `brt.data.json_files`); its records have at most `max_bytes` bytes."""
    for record in json_files.read(file, errors=errors, max_bytes=max_bytes):
        read = partial(_json_text, record, field, errors)
        if (text := bad.call_and_collect(read, file.name, line=record.number)) is not None:
            yield record.name, text


def table_texts(file: File, *, field: str, errors: str, bad: Quarantine) -> Iterator[tuple]:
    """Reads the rows of a table; see `brt.data.rows.tables`."""
    for number, row in enumerate(tables.rows(file)):
        read = partial(_row_text, row, field, errors)
        if (text := bad.call_and_collect(read, file.name, record=number)) is not None:
            yield row.name, text


def array_record_texts(
    file: File, *, field: str, errors: str, max_bytes: int, bad: Quarantine
) -> Iterator[tuple]:
    """Reads an ArrayRecord file, whose records are UTF-8 texts or JSON objects."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(file.path))
        count = reader.num_records()
        if count == 0:
            raise BadRecord(f"{file.name} is not an ArrayRecord file, or has no record")
        for start in range(0, count, READ_RECORDS):
            for i, record in enumerate(reader.read(start, min(start + READ_RECORDS, count)), start):
                name = f"{file.name}:{i}"
                if len(record) > max_bytes:
                    raise contents.too_large(name, max_bytes)
                is_json = record.lstrip()[:1] == b"{"
                read = partial(_record_text, name, record, is_json, field, errors)
                if (text := bad.call_and_collect(read, file.name, record=i)) is not None:
                    yield name, text
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise BadRecord(f"{file.name} is damaged: {str(error).partition(';')[0]}") from error


def tfds_texts(source: str, *, field: str, errors: str, bad: Quarantine) -> Iterator[tuple]:
    """Reads the examples of a TensorFlow dataset, which is named `tfds:NAME/SPLIT`."""
    for i, example in enumerate(sources.tfds_data(source).examples):
        name = f"{source}:{i}"
        read = partial(_example_text, name, example, field, errors)
        if (text := bad.call_and_collect(read, source, record=i)) is not None:
            yield name, text


def _json_text(record: Record, field: str, errors: str) -> str:
    if record.problem:
        remedy = "" if ";" in record.problem else "; repair it"
        if "UTF-8 at byte" in record.problem:
            remedy = f"; repair it, or read such bytes as U+FFFD with {REPLACE}"
        raise BadRecord(f"{record.name} {record.problem}{remedy}")
    if isinstance(record.value, str):  # The members of a JSON array may be texts, not objects.
        return _checked(record.name, record.value, errors)
    return _value_text(record.name, _field(record.name, record.value, field), errors)


def _record_text(name: str, data: bytes, is_json: bool, field: str, errors: str) -> str:
    if is_json:
        return _json_text(json_files.parse(name, 0, data, errors), field, errors)
    return _value_text(name, data, errors)


def _row_text(row: Row, field: str, errors: str) -> str:
    if row.problem:
        raise BadRecord(f"{row.name} {row.problem}")
    return _value_text(row.name, _field(row.name, row.values, field), errors)


def _example_text(name: str, example: Any, field: str, errors: str) -> str:
    return _value_text(name, _field(name, example, field), errors)


def _value_text(name: str, value: Any, errors: str) -> str:
    """Returns the text of a value, which is a text or a list of texts (paragraphs)."""
    parts = value if isinstance(value, list) else [value]
    return _checked(name, "\n".join(_part(name, part, errors) for part in parts), errors)


def _part(name: str, value: Any, errors: str) -> str:
    if isinstance(value, bytes):
        value = plain_text.decoded(name, value, errors, REPLACE)
    if not isinstance(value, str):
        raise BadRecord(f"{name} holds {tables.type_name(value)}, not text; leave it out")
    return value.removeprefix(plain_text.MARK)


def _checked(name: str, text: str, errors: str) -> str:
    text = text.removeprefix(plain_text.MARK)
    if not text.strip():
        raise plain_text.no_text(name)
    if fault := plain_text.binary(plain_text.unreadable(text), len(text)):
        raise BadRecord(f"{name} {fault}")
    text = plain_text.without_nul(name, text, errors, remedy=REPLACE)
    if problem := plain_text.problem(text):
        raise BadRecord(f"{name} {problem}; repair it, or read it as U+FFFD with {REPLACE}")
    return text


def _field(name: str, example: Any, field: str) -> Any:
    """Returns the value of a field; raises BadRecord if the field is missing or is not text."""
    if not isinstance(example, Mapping):
        raise BadRecord(f"{name} is not an object with a field '{field}'; leave it out")
    values = tables.flat(example)
    value = values.get(field)
    if _is_text(value):
        return value
    what = f" has no field '{field}'"
    if field in values:
        what = f": the field '{field}' is {tables.type_name(value)}, not text"
    texts = [other for other in sorted(values)[:_SHOWN] if _is_text(values[other])]
    one = "write the texts to one field, or leave it out"
    if not texts:
        raise BadRecord(f"{name}{what}, and no other field has text; {one}")
    raise BadRecord(
        f"{name}{what}; name one of {texts} with {_REMEDY} if every record has it, otherwise {one}"
    )


def _is_text(value: Any) -> bool:
    """Returns True for a text and for a list of texts."""
    parts = value if isinstance(value, list) and value else [value]
    return all(isinstance(part, str | bytes) for part in parts)
