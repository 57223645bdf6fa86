"""Reads the rows of JSON, CSV, TSV, Parquet and Arrow files and of TensorFlow datasets.

A row that cannot be read is returned with a `problem`, and reading continues with the next row.
"""

import csv
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import contents, formats, plain_text, sources
from brt.data.quarantine import BadRow
from brt.data.sources import File
from brt.errors import DataError

FORMATS = formats.ROWS
READ_ROWS = 64  # This number of Parquet or Arrow rows is converted to Python objects at a time.


class Row(NamedTuple):
    """A row of a table."""

    # FILE:NUMBER. Lines of JSON and records of CSV are counted from one, including the header of
    # CSV. Rows of Parquet and Arrow and examples of TensorFlow datasets are counted from zero.
    name: str
    values: Mapping[str, Any]  # by name of the column; a text is a str, or bytes not yet decoded
    problem: str = ""  # why the row cannot be read, such as "is not JSON"


class Table(NamedTuple):
    """A table: its name, and an iterator over its rows, which have the same columns."""

    name: str
    rows: Iterator[Row]


def tables(
    source: str, suffixes: tuple[str, ...] = FORMATS, header: tuple[str, ...] = ()
) -> Iterator[Table]:
    """Yields the tables that belong to a source, which is named as `brt.data.sources` describes.

    `header` has the names of the columns of .tsv files, where "" leaves out a column; () reads the
    names from the first line of each file. A file with another suffix than `suffixes` raises
    DataError.
    """
    if source.startswith("tfds:"):
        yield Table(source, examples(source))
        return
    for file in sources.files(source, suffixes):
        ending = formats.without_compression(file.path.name)
        if not ending.endswith(suffixes):
            raise DataError(
                f"{file.name} ends in none of {', '.join(suffixes)}; all may be compressed "
                f"({', '.join(formats.COMPRESSED)})"
            )
        yield Table(file.name, rows(file, header))


def read(
    source_tables: Iterable[Table],
    choose: Callable[[str, Mapping[str, Any]], Any],
    item: Callable[[Row, Any, int], Any],
) -> Iterator[Any]:
    """Yields an item for each row of some tables, in order, or a BadRow if the row has a problem.

    A table that has no row, or lacks a column, raises DataError.

    Args:
      choose: function from the name of a table and the values of its first row to the columns that
        are read from the table.
      item: function from a row, the result of `choose`, and the number of the row (counted over all
        tables, from 0) to the item.
    """
    number = 0
    for table in source_tables:
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


def check_columns(table: str, header: Collection[str], configured: Mapping[str, str]) -> str:
    """Raises DataError if a table lacks a configured column.

    `configured` maps the roles of columns, such as "text", to names of columns ("" for none).
    Returns a phrase about the existing columns, for further messages.
    """
    exist = f"its columns are {', '.join(header)}"
    for role, name in configured.items():
        if name and name not in header:
            raise DataError(
                f"{table} has no column '{name}' as Data.columns says for '{role}'; {exist}"
            )
    return exist


def rows(file: File, header: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yields the rows of a file, whose suffix determines the format; `header` is as in `tables`."""
    match formats.kind(file.path.name):
        case "parquet" | "arrow":
            return _columnar(file)
        case "csv":
            return _separated(file, csv.reader(_lines(file), strict=True))
        case "tsv":
            # TSV has no quotation, so a quote is a part of a value.
            lines = (line.removesuffix("\n").removesuffix("\r") for line in _lines(file))
            return _separated(file, (line.split("\t") if line else [] for line in lines), header)
        case _:
            return _objects(contents.read_json(file))


def _objects(records: Iterable[contents.Record]) -> Iterator[Row]:
    for record in records:
        if record.problem or isinstance(record.value, dict):
            yield Row(record.name, flat(record.value or {}), record.problem)
        else:
            yield Row(record.name, {}, "is not a JSON object")


def flat(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the columns of nested objects: {"data": {"text": ...}} becomes {"data.text": ...}."""
    if not any(isinstance(value, Mapping) for value in values.values()):
        return values
    columns = {}
    for name, value in values.items():
        inner = flat(value) if isinstance(value, Mapping) else {}
        columns |= {f"{name}.{key}": v for key, v in inner.items()} if inner else {name: value}
    return columns


def text_of(values: Mapping[str, Any], column: str) -> str:
    """Returns the text in a column (see `text_value`); a list of texts is joined by line feeds."""
    if column not in values:
        raise ValueError(f"has no column '{column}'")
    value = values[column]
    if isinstance(value, list):
        return "\n".join(text_value(part, column) for part in value)
    return text_value(value, column)


def text_value(value: Any, column: str = "") -> str:
    """Returns the value of a column as a text, without a byte order mark at its start.

    A value that is no usable text raises ValueError, whose message is a phrase such as "has nothing
    in 'document'". The phrase names the column unless `column` is "".
    """
    of, inside = (f" of '{column}'", f" in '{column}'") if column else ("", "")
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{contents.not_utf8(error)}{of}") from error
    if not isinstance(value, str):
        actual = type_name(value) + ("" if value is None else ", not text,")
        raise ValueError(f"has {actual}{inside}")
    if problem := plain_text.problem(value):
        raise ValueError(f"{problem}{of}")
    if fault := plain_text.binary(plain_text.unreadable(value), len(value)):
        raise ValueError(f"{fault.partition(';')[0]}{of}")
    return value.removeprefix(plain_text.MARK)


def row_id(value: Any, number: int) -> str:
    """Returns the id of a row as a text, or the row's number if the id is missing (None or NaN)."""
    if value is None or value != value:  # A column of floats represents a missing id by NaN.
        return str(number)
    # pandas writes integer ids as floats if some are missing.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float) else text_value(value, "id")


class Unread(NamedTuple):
    """Placeholder for a value that brt does not read; `type` is the name of the value's type."""

    type: str


def type_name(value: Any) -> str:
    """Returns the name of a value's type, for error messages; "nothing" for None."""
    if value is None:
        return "nothing"
    return value.type if isinstance(value, Unread) else type(value).__name__


def unique(file: str, columns: Sequence[str]) -> Sequence[str]:
    """Returns the names of columns unchanged; raises DataError if a name occurs twice."""
    twice = [column for column, count in Counter(columns).items() if column and count > 1]
    if twice:
        raise DataError(f"{file} names the column {twice[0]!r} twice; rename one of them")
    return columns


def _lines(file: File) -> Iterator[str]:
    """Yields lines, in which surrogates represent bytes that are not UTF-8."""
    for line in contents.lines(file.name, contents.text(file)):
        yield (line + b"\n").decode("utf-8", "surrogateescape")


def _separated(
    file: File, records: Iterator[list[str]], header: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Yields the records of a CSV (RFC 4180) or TSV file; leaves out columns without a name.

    A value that is not UTF-8 is returned as bytes; the other values of the row stay texts.
    """
    # Documents may exceed the csv module's default limit of 128 kB for a field.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    names: Sequence[str] = header
    number = 0
    try:
        for number, fields in enumerate(records, 1):
            name = f"{file.name}:{number}"
            if not names:
                names = unique(file.name, [field.removeprefix(plain_text.MARK) for field in fields])
            elif len(fields) == len(names):
                named = zip(names, fields, strict=True)
                yield Row(name, {column: _unescaped(text) for column, text in named if column})
            elif any(fields):
                yield Row(name, {}, f"has {len(fields)} fields where the header has {len(names)}")
    except csv.Error as error:
        raise DataError(f"{file.name} is not CSV after its record {number} ({error})") from error


def _unescaped(text: str) -> str | bytes:
    """Returns a text unchanged, or as the original bytes if some of them were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text


def _columnar(file: File) -> Iterator[Row]:
    """Yields the rows of a Parquet or Arrow file; texts are bytes that are not decoded yet."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{file.name} needs a library: pip install pyarrow") from error
    is_parquet = formats.kind(file.path.name) == "parquet"
    number = 0
    try:
        for batch in (_parquet if is_parquet else _arrow)(file):
            names = unique(file.name, batch.schema.names)
            for values in zip(*map(_column, batch.columns), strict=True):
                yield Row(f"{file.name}:{number}", flat(dict(zip(names, values, strict=True))))
                number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        kind, reason = "a Parquet" if is_parquet else "an Arrow", str(error).partition("\n")[0]
        raise DataError(f"{file.name} is not {kind} file, or damaged ({reason})") from error


def _parquet(file: File) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(_unpacked(file)) as table:
        yield from table.iter_batches(batch_size=READ_ROWS)


def _arrow(file: File) -> Iterator[Any]:
    """Yields the batches of an Arrow file or stream, such as `Dataset.save_to_disk` writes."""
    import pyarrow as pa

    source = _unpacked(file)
    with source if isinstance(source, pa.NativeFile) else pa.memory_map(str(source)) as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(opened) as reader:
            count = reader.num_record_batches if is_file else 0
            for batch in map(reader.get_batch, range(count)) if is_file else reader:
                # This refuses forged offsets, which would let pyarrow read memory of other objects.
                batch.validate(full=True)
                for start in range(0, len(batch), READ_ROWS):
                    yield batch.slice(start, READ_ROWS)


def _unpacked(file: File) -> Any:
    """Returns the path of a file, or its content as a stream if the whole file is compressed."""
    import pyarrow as pa

    if not formats.compression_suffix(file.path.name):
        return file.path
    data = contents.no_more_than(untrusted.LARGEST, file.name, contents.content(file))
    return pa.BufferReader(b"".join(data))


def _column(column: Any) -> list[Any]:
    """Returns the values of a column as Python objects like those of JSON, but texts as bytes.

    Lists and structs become lists and dicts. A value of another type that is no text and no number
    becomes `Unread`.
    """
    import pyarrow as pa
    import pyarrow.compute

    def is_any(names: Sequence[str]) -> bool:
        return any(getattr(pa.types, f"is_{name}")(kind) for name in names)

    kind = column.type
    if isinstance(kind, pa.DictionaryType):
        return _column(column.dictionary_decode())
    if is_any(_NUMBERS):
        return column.to_pylist()
    if str(kind).removeprefix("large_") in _TEXTUAL:
        return column.cast(pa.large_binary()).to_pylist()
    valid = column.is_valid().to_pylist()
    values: Iterable[Any] = itertools.repeat(Unread(str(kind)))
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        fields = [_column(column.field(i)) for i in range(len(names))]
        row_values = zip(*fields, strict=True) if fields else itertools.repeat(())
        values = (dict(zip(names, row, strict=True)) for row in row_values)
    elif is_any(_LISTS):
        members = iter(_column(column.flatten()))
        lengths = pa.compute.list_value_length(column).to_pylist()
        values = (list(itertools.islice(members, length or 0)) for length in lengths)
    return [value if there else None for value, there in zip(values, valid, strict=False)]


_TEXTUAL = ("string", "binary", "string_view", "binary_view")
_NUMBERS = ("integer", "floating", "boolean", "null")
_LISTS = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")


def examples(source: str) -> Iterator[Row]:
    """Yields the examples of a TensorFlow dataset as rows."""
    for i, example in enumerate(sources.tfds_data(source).examples):
        yield Row(f"{source}:{i}", flat(example))
