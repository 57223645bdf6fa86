"""Rows of tables as sentences with their labels."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from brt import config
from brt.data.rows import tables
from brt.data.rows.tables import Row
from brt.data.rows.tally import BadRow
from brt.errors import DataError

ENDINGS = (*tables.FORMATS, ".tsv")
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
    found = (table for name in names for table in tables.tables(name, ENDINGS, section.header))
    label = _number if numbers else _class
    return tables.read(
        found,
        lambda table, there: choose(table, there, section),
        lambda row, columns, count: _example(row, columns, count, label),
    )


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
        try:
            text = tables.text(row.values.get(column), column)
        except ValueError as error:
            return BadRow(row.name, str(error))
        if not text.strip():
            what = "no text" if text else "nothing"
            return BadRow(row.name, f"has {what} in '{column}'")
        texts.append(text)
    try:
        label = read_label(row.values.get(columns.label))
    except ValueError as error:
        return BadRow(row.name, f"{error} in '{columns.label}'")
    try:
        id = tables.name(row.values.get(columns.id), count)
    except ValueError as error:
        return BadRow(row.name, str(error))
    return Example(row.name, id, tuple(texts), label)


def _class(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float):
        raise ValueError(
            f"has the number {value} for a label (Training.task = 'text_regression' learns numbers)"
        )
    if value is None or value == "":
        raise ValueError("has no label")
    return str(value) if isinstance(value, int) else tables.text(value)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"has {value!r}, which is no number,")
    return number
