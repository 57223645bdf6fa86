"""Rows of JSONL, CSV, TSV, Parquet and TensorFlow datasets, each with a name to report it by.

A row that cannot be read is still a row: its `problem` says why, and reading goes on.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import documents, records, sources
from brt.data.rows.tally import BadRow
from brt.data.sources import File
from brt.errors import DataError

FORMATS = (".jsonl", ".csv", ".parquet")
READ_ROWS = 64  # Parquet rows turned into Python at a time


class Row(NamedTuple):
    """A row: text as str, or as bytes that nobody has decoded yet.

    Attributes:
      name: file:row. Lines of JSONL and records of CSV (its header is the first) count from
        one; rows of Parquet and examples of TensorFlow datasets from zero.
      problem: what is wrong where there are no values, as "is not JSON".
    """

    name: str
    values: Mapping[str, Any]
    problem: str = ""


class Table(NamedTuple):
    """Rows with the same columns."""

    name: str
    rows: Iterator[Row]


def tables(
    source: str, formats: tuple[str, ...] = FORMATS, header: tuple[str, ...] = ()
) -> Iterator[Table]:
    """The tables behind `source` (see `brt.data.sources`).

    Args:
      formats: endings of files; ".tsv" beside `FORMATS`.
      header: names for the columns of .tsv files, "" for one to leave out; (): the first line's.

    Raises:
      DataError: there is none, or a file is damaged or of another format.
    """
    if source.startswith("tfds:"):
        yield Table(source, _tfds(source))
        return
    for file in sources.files(source, formats):
        yield Table(file.name, _rows(file, formats, header))


def read(
    found: Iterable[Table],
    choose: Callable[[str, Mapping[str, Any]], Any],
    item: Callable[[Row, Any, int], Any],
) -> Iterator[Any]:
    """What the rows of tables hold, in order, and a BadRow for each without values.

    Args:
      choose: the columns to read, of a table and its first row.
      item: what a row holds in these columns; rows are numbered through all tables, so that ids
        differ.

    Raises:
      DataError: a table has no row, or not the columns.
    """
    number = 0
    for table in found:
        columns = row = None
        for row in table.rows:
            if row.problem:
                yield BadRow(row.name, row.problem)
            else:
                columns = columns or choose(table.name, row.values)
                yield item(row, columns, number)
            number += 1
        if row is None:
            raise DataError(f"{table.name} has no row")


def _rows(file: File, formats: tuple[str, ...], header: tuple[str, ...]) -> Iterator[Row]:
    name = file.path.name
    if name.endswith(".parquet"):
        return _parquet(file)
    for packed in sources.COMPRESSED:
        name = name.removesuffix(packed)
    readers = {".jsonl": jsonl, ".csv": _csv, ".tsv": lambda file: _tsv(file, header)}
    for ending in (ending for ending in readers if ending in formats):
        if name.endswith(ending):
            return readers[ending](file)
    raise DataError(
        f"{file.name} ends in none of {', '.join(formats)}"
        + f"; the first two may be compressed ({', '.join(sources.COMPRESSED)})"
        * (formats == FORMATS)
    )


def jsonl(file: File) -> Iterator[Row]:
    """The rows of a file of JSON lines, whatever it is called; empty lines are none."""
    for number, line in enumerate(records.lines(file.name, documents.content(file)), 1):
        if line.strip():
            yield _json_row(f"{file.name}:{number}", line)


def _json_row(name: str, line: bytes) -> Row:
    try:
        value = untrusted.parse_json(line.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        return Row(name, {}, not_utf8(error))
    except json.JSONDecodeError as error:
        return Row(name, {}, f"is not JSON: {error.msg} at column {error.colno}")
    return Row(name, value) if isinstance(value, dict) else Row(name, {}, "is no JSON object")


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are not UTF-8."""
    return f"is not UTF-8 at byte {error.start} (0x{error.object[error.start]:02x})"


def _csv(file: File) -> Iterator[Row]:
    """Records as RFC 4180 quotes them; bytes that are not UTF-8 spoil their own row only."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a document is longer than its 128 kB
    lines = (
        (line + b"\n").decode("utf-8", "surrogateescape")
        for line in records.lines(file.name, documents.content(file))
    )
    found = csv.reader(lines, strict=True)
    number = 0
    try:
        header = [name.removeprefix("\ufeff") for name in next(found, [])]
        number = 1
        for number, fields in enumerate(found, 2):
            name = f"{file.name}:{number}"
            if len(fields) == len(header):
                yield Row(name, dict(zip(header, map(_unescaped, fields), strict=True)))
            elif any(fields):
                sizes = f"has {len(fields)} fields where the header has {len(header)}"
                yield Row(name, {}, sizes)
    except csv.Error as error:
        raise DataError(f"{file.name} is no CSV behind its record {number} ({error})") from error


def _tsv(file: File, header: tuple[str, ...]) -> Iterator[Row]:
    """Lines of tab-separated values without quotes; a column without a name is left out."""
    names: Sequence[str] = header
    for number, line in enumerate(records.lines(file.name, documents.content(file)), 1):
        name = f"{file.name}:{number}"
        if not line.strip(b"\r"):
            continue
        try:
            fields = line.decode("utf-8").removesuffix("\r").split("\t")
        except UnicodeDecodeError as error:
            yield Row(name, {}, not_utf8(error))
            continue
        if not names:
            names = [field.removeprefix("\ufeff") for field in fields]
        elif len(fields) == len(names):
            named = zip(names, fields, strict=True)
            yield Row(name, {column: field for column, field in named if column})
        else:
            yield Row(name, {}, f"has {len(fields)} fields where the header has {len(names)}")


def _unescaped(text: str) -> str | bytes:
    """The bytes where some of them were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text


def _parquet(file: File) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file.name} needs a library: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            number = 0
            for batch in table.iter_batches(batch_size=READ_ROWS):
                names = batch.schema.names
                for values in zip(*map(_column, batch.columns), strict=True):
                    yield Row(f"{file.name}:{number}", dict(zip(names, values, strict=True)))
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{file.name} is no Parquet file, or damaged ({reason})") from error


def _column(column: Any) -> list[Any]:
    """Text as bytes, also within lists; numbers; None for what is neither."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type):
        return column.to_pylist()
    wanted = pa.large_binary()
    inner = column.type
    if pa.types.is_list(inner) or pa.types.is_large_list(inner):
        inner, wanted = inner.value_type, pa.large_list(wanted)
    textual = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    if any(is_kind(inner) for is_kind in (*textual, pa.types.is_large_binary)):
        return column.cast(wanted).to_pylist()
    return [None] * len(column)


def _tfds(source: str) -> Iterator[Row]:
    for i, example in enumerate(sources.tfds_data(source).examples):
        yield Row(f"{source}:{i}", example)
