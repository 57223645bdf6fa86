"""Documents and summaries from tables: in which columns they are, and the text in them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brt.data.rows import tables
from brt.data.rows.tables import Row
from brt.data.rows.tally import BadRow
from brt.errors import DataError

USUAL = (
    ("document", "summary"),  # XSum, Multi-News, the embedded ones
    ("article", "highlights"),  # CNN/DailyMail
    ("article", "abstract"),  # scientific papers
    ("dialogue", "summary"),  # SAMSum
    ("text", "summary"),  # BillSum
    ("report", "summary"),  # GovReport, and the names of its parts in TFDS
    ("report", "highlight"),
    ("reports", "summary"),
    ("utt", "summary"),  # MediaSum
    ("description", "abstract"),  # BigPatent
    ("article_text", "abstract_text"),  # scientific papers as their authors publish them
    ("article", "summary"),
    ("transcript", "summary"),
    ("body", "summary"),
    ("chapter", "summary_text"),  # BookSum
    ("extract_text", "summary_text"),
    ("news_body", "news_title"),
    ("source", "target"),
    ("input", "output"),
)
SPEAKER = "speaker"  # a list beside a list of utterances


class Columns(NamedTuple):
    """Names of columns; "" stands for the usual one, and for no column of ids."""

    source: str = ""
    target: str = ""
    id: str = ""


ANY = Columns()


class Pair(NamedTuple):
    """A document and its summary; `name` is file:row, `id` what the predictions call it."""

    name: str
    id: str
    source: str
    target: str


def read(names: Sequence[str], asked: Columns = ANY) -> Iterator[Pair | BadRow]:
    """The rows of the sources (see `brt.data.rows.tables`) in order.

    Raises:
      DataError: a source cannot be read, has no row, or not the columns.
    """
    found = (table for name in names for table in tables.tables(name))
    return tables.read(found, lambda table, there: choose(table, there, asked), pair)


def choose(table: str, there: Collection[str], asked: Columns = ANY) -> Columns:
    """The columns that are asked for, else the first of the usual ones that are there.

    Raises:
      DataError: there are none; names the columns that exist.
    """
    exist = f"its columns are {', '.join(there)}"
    for field, name in zip(("source_field", "target_field", "id_field"), asked, strict=True):
        if name and name not in there:
            raise DataError(f"{table} has no column '{name}' as {field} says; {exist}")
    for usual_source, usual_target in USUAL:
        source, target = asked.source or usual_source, asked.target or usual_target
        if source in there and target in there and source != target:
            return Columns(source, target, asked.id or ("id" if "id" in there else ""))
    raise DataError(
        f"{table} has no document and summary under a usual name; {exist}: name two of them with "
        "source_field and target_field"
    )


def pair(row: Row, columns: Columns, number: int) -> Pair | BadRow:
    """The row's document and summary; its number is the id where there is no column of ids."""
    try:
        _check(row.problem)
        source = _source(row.values, columns)
        target = _text(row.values, columns.target)
        _check("" if source.strip() else "has an empty document")
        _check("" if target.strip() else "has an empty summary")
        name = tables.name(row.values.get(columns.id), number)
    except ValueError as problem:
        return BadRow(row.name, str(problem))
    return Pair(row.name, name, source, target)


def _check(problem: str) -> None:
    if problem:
        raise ValueError(problem)


def _source(values: Mapping[str, Any], columns: Columns) -> str:
    utterances, speakers = values.get(columns.source), values.get(SPEAKER)
    if not (isinstance(utterances, list) and isinstance(speakers, list)):
        return _text(values, columns.source)
    if len(utterances) != len(speakers):
        raise ValueError(f"has {len(utterances)} utterances and {len(speakers)} speakers")
    said = zip(speakers, utterances, strict=True)
    return " ".join(
        f"{tables.text(who, SPEAKER)}: {tables.text(what, 'utt')}" for who, what in said
    )


def _text(values: Mapping[str, Any], column: str) -> str:
    if column not in values:
        raise ValueError(f"has no column '{column}'")
    value = values[column]
    if isinstance(value, list):  # paragraphs or sentences
        return "\n".join(tables.text(part, column) for part in value)
    return tables.text(value, column)
