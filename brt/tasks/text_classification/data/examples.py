"""Reads sentences with their labels from tables.

The columns are named in the config, or have common names such as "sentence" and "label".
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from brt import config
from brt.config.checks import column
from brt.data.rows import tables
from brt.data.rows.tables import Row
from brt.data.rows.tally import BadRow
from brt.errors import DataError

ENDINGS = (*tables.FORMATS, ".tsv")
# These are the columns of sentences and of pairs of sentences in GLUE and other common datasets, in
# order of preference.
SENTENCES = (
    ("sentence1", "sentence2"),  # RTE, WNLI and STS-B have these columns.
    ("premise", "hypothesis"),  # MNLI has these columns.
    ("question", "sentence"),  # QNLI has these columns.
    ("question1", "question2"),  # QQP has these columns.
    ("#1 String", "#2 String"),  # MRPC has these columns.
    ("sentence",),  # CoLA and SST-2 have this column.
    ("text",),
)
LABELS = ("label", "gold_label", "is_duplicate", "Quality", "score")
IDS = ("id", "idx", "index")


class Example(NamedTuple):
    """One sentence or a pair of sentences, with a label or a number."""

    name: str  # file and row, for messages
    id: str  # identifies the row in files of predictions
    texts: tuple[str, ...]  # one or two sentences
    label: str | float


class Columns(NamedTuple):
    """Names of the columns of a table that are read."""

    texts: tuple[str, ...]  # columns of one or two sentences
    label: str  # column of the label or number
    id: str  # "" if the table has no ids


def read(
    names: Sequence[str], section: config.Sentences, numbers: bool = False
) -> Iterator[Example | BadRow]:
    """Yields the rows of all sources in order, and a BadRow for each row that cannot be used.

    The id of a row without an id is its number; the numbers continue from source to source. With
    `numbers`, labels are real numbers instead of classes.
    """
    sources = (table for name in names for table in tables.tables(name, ENDINGS, section.header))
    label = _number if numbers else _class
    return tables.read(
        sources,
        lambda table, header: choose_columns(table, header, section),
        lambda row, columns, count: _example(row, columns, count, label),
    )


def choose_columns(table: str, header: Collection[str], section: config.Sentences) -> Columns:
    """Returns the columns that are read from a table: those that `section` names, or usual ones."""
    exist = f"its columns are {', '.join(header)}"
    for role in ("first", "second", "label", "id"):
        if (name := column(section, role)) and name not in header:
            raise DataError(
                f"{table} has no column '{name}' as Data.columns says for '{role}'; {exist}"
            )
    configured = tuple(filter(None, (section.first_field, section.second_field)))
    common = (names for names in SENTENCES if all(name in header for name in names))
    texts = configured or next(common, ())
    label = section.label_field or next((name for name in LABELS if name in header), "")
    if not texts or not label:
        what, role = ("label", "label") if texts else ("sentence", "first")
        raise DataError(
            f"{table} has no {what} under a usual name; {exist}: name one with Data.columns = "
            f"('{role}=COLUMN',)"
        )
    id = section.id_field or next((name for name in IDS if name in header), "")
    return Columns(texts, label, id)


def _example(
    row: Row, columns: Columns, count: int, read_label: Callable[[Any], str | float]
) -> Example | BadRow:
    texts = []
    for name in columns.texts:
        try:
            text = tables.text_of(row.values, name)
        except ValueError as error:
            return BadRow(row.name, str(error))
        if not text.strip():
            what = "no text" if text else "nothing"
            return BadRow(row.name, f"has {what} in '{name}'")
        texts.append(text)
    try:
        label = read_label(row.values.get(columns.label))
    except ValueError as error:
        return BadRow(row.name, f"{error} in '{columns.label}'")
    try:
        id = tables.row_id(row.values.get(columns.id), count)
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
    return str(value) if isinstance(value, int) else tables.text_value(value)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"has {value!r}, which is no number,")
    return number
