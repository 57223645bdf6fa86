"""Rows of tables as sentences with their labels."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brt import config
from brt.data import documents, records, sources
from brt.data.pairs import rows
from brt.data.pairs.columns import BadRow
from brt.data.pairs.rows import Row, Table
from brt.data.sources import File
from brt.errors import DataError

ENDINGS = (*rows.FORMATS, ".tsv")
SENTENCES = (  # GLUE's columns, in its files and elsewhere
    ("sentence1", "sentence2"),  # RTE, WNLI, STS-B
    ("premise", "hypothesis"),  # MNLI
    ("question", "sentence"),  # QNLI
    ("question1", "question2"),  # QQP
    ("#1 String", "#2 String"),  # MRPC
    ("sentence",),  # CoLA, SST-2
    ("text",),
)
LABELS = ("label", "gold_label", "is_duplicate", "Quality", "score")
IDS = ("id", "idx", "index")


class Example(NamedTuple):
    """One sentence or two, and a label or a number.

    `name` is file:row, `id` what predictions call it.
    """

    name: str
    id: str
    texts: tuple[str, ...]
    label: str | float


class Columns(NamedTuple):
    """Names of columns; `id` may be empty."""

    texts: tuple[str, ...]
    label: str
    id: str


def read(
    names: Sequence[str], section: config.Sentences, numbers: bool = False
) -> Iterator[Example | BadRow]:
    """The rows of the sources in order; they are counted through all of them.

    Args:
      numbers: labels are real numbers.

    Raises:
      DataError: a source cannot be read, has no row, or not the columns.
    """
    label = _number if numbers else _class
    count = 0
    for table in (table for name in names for table in _tables(name, section)):
        chosen = row = None
        for row in table.rows:
            if chosen is None and not row.problem:
                chosen = choose(table.name, row.values, section)
            bad = row.problem
            yield BadRow(row.name, bad) if bad else _example(row, chosen, count, label)
            count += 1
        if row is None:
            raise DataError(f"{table.name} has no row")


def choose(table: str, there: Collection[str], section: config.Sentences) -> Columns:
    """The columns that are asked for, else usual ones that are there.

    Raises:
      DataError: there are none; names the columns that exist.
    """
    exist = f"its columns are {', '.join(there)}"
    for field in ("first_field", "second_field", "label_field", "id_field"):
        if (name := getattr(section, field)) and name not in there:
            raise DataError(f"{table} has no column '{name}' as Sentences.{field} says; {exist}")
    asked = tuple(filter(None, (section.first_field, section.second_field)))
    usual = (names for names in SENTENCES if all(name in there for name in names))
    texts = asked or next(usual, ())
    label = section.label_field or next((name for name in LABELS if name in there), "")
    if not texts or not label:
        what, field = ("label", "label_field") if texts else ("sentence", "first_field")
        raise DataError(
            f"{table} has no {what} under a usual name; {exist}: name one with Sentences.{field}"
        )
    id = section.id_field or next((name for name in IDS if name in there), "")
    return Columns(texts, label, id)


def _example(
    row: Row, columns: Columns, count: int, read_label: Callable[[Any], str | float]
) -> Example | BadRow:
    texts = []
    for column in columns.texts:
        text = _text(row.values.get(column))
        if text is None or not text.strip():
            what = "has nothing" if text == "" or column not in row.values else "has no text"
            return BadRow(row.name, f"{what} in '{column}'")
        texts.append(text)
    try:
        label = read_label(row.values.get(columns.label))
    except ValueError as error:
        return BadRow(row.name, f"{error} in '{columns.label}'")
    id = row.values.get(columns.id, count)
    return Example(row.name, _text(id) or str(id), tuple(texts), label)


def _class(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float):
        raise ValueError(
            f"has the number {value} for a label (Training.objective = 'regression' learns numbers)"
        )
    label = str(value) if isinstance(value, int) else _text(value)
    if not label:
        raise ValueError("has no label")
    return label


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"has {value!r}, which is no number,")
    return number


def _text(value: Any) -> str | None:
    """None for what is no text in UTF-8."""
    try:
        text = value.decode("utf-8") if isinstance(value, bytes) else value
        return text if isinstance(text, str) and text.encode() is not None else None
    except UnicodeError:
        return None


def _tables(source: str, section: config.Sentences) -> Iterator[Table]:
    if source.startswith("tfds:"):
        yield from rows.tables(source)
        return
    for file in sources.files(source, ENDINGS):
        name = file.path.name
        for packed in sources.COMPRESSED:
            name = name.removesuffix(packed)
        if not name.endswith(ENDINGS):
            raise DataError(f"{file.name} ends in none of {', '.join(ENDINGS)}")
        if name.endswith(".tsv"):
            yield Table(file.name, _tsv(file, section.header))
        else:
            yield from rows.tables(str(file.path))


def _tsv(file: File, header: tuple[str, ...]) -> Iterator[Row]:
    """Lines of tab-separated values without quotes; a column without a name is left out."""
    found = enumerate(records.lines(documents.content(file)), 1)
    names: Sequence[str] = header
    for number, line in found:
        name = f"{file.name}:{number}"
        if not line.strip(b"\r"):
            continue
        try:
            fields = line.decode("utf-8").removesuffix("\r").split("\t")
        except UnicodeDecodeError as error:
            yield Row(name, {}, rows.not_utf8(error))
            continue
        if not names:
            names = [field.removeprefix("\ufeff") for field in fields]
        elif len(fields) == len(names):
            yield Row(name, _named(names, fields))
        else:
            yield Row(name, {}, f"has {len(fields)} fields where the header has {len(names)}")


def _named(names: Sequence[str], fields: Sequence[str]) -> Mapping[str, str]:
    return {name: field for name, field in zip(names, fields, strict=True) if name}
