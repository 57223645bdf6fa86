"""Reads pairs of document and summary from tables.

The names of the two columns are taken from the config, or are common names such as "article" and
"highlights".
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brt.data import tables
from brt.data.quarantine import BadRow
from brt.data.tables import Row
from brt.errors import DataError

# These are the columns of document and summary in common datasets, in order of preference.
COMMON = (
    ("document", "summary"),  # XSum, Multi-News and brt's own pairs have these columns.
    ("article", "highlights"),  # CNN/DailyMail has these columns.
    ("article", "abstract"),  # Scientific Papers has these columns.
    ("dialogue", "summary"),  # SAMSum has these columns.
    ("text", "summary"),  # BillSum has these columns.
    ("report", "summary"),  # GovReport has these columns.
    ("report", "highlight"),  # A part of GovReport in TFDS has these columns.
    ("reports", "summary"),  # The other part of GovReport in TFDS has these columns.
    ("utt", "summary"),  # MediaSum has these columns.
    ("description", "abstract"),  # BigPatent has these columns.
    # Scientific Papers has these columns in the form in which its authors publish it.
    ("article_text", "abstract_text"),
    ("article", "summary"),
    ("transcript", "summary"),
    ("body", "summary"),
    ("chapter", "summary_text"),  # BookSum has these columns.
    ("extract_text", "summary_text"),
    ("news_body", "news_title"),
    ("source", "target"),
    ("input", "output"),
)
SPEAKER = "speaker"  # This column has the speaker of each utterance of a dialogue.


class Columns(NamedTuple):
    """Names of the columns that contain the pairs of a table.

    If `source` or `target` is "", a name in `COMMON` is used. If `id` is "", the column "id" is
    used, unless the table has no such column.
    """

    source: str = ""
    target: str = ""
    id: str = ""


ANY = Columns()


class Pair(NamedTuple):
    """A document and its summary."""

    name: str  # file and row, for messages
    id: str  # identifies the pair in files of predictions
    source: str
    target: str


def read(names: Sequence[str], configured: Columns = ANY) -> Iterator[Pair | BadRow]:
    """Yields the pairs of all sources in order, and a BadRow for each row that cannot be used.

    Raises DataError if a source cannot be read, has no row, or lacks a column that is needed.
    """
    sources = (table for name in names for table in tables.tables(name))
    return tables.read(
        sources, lambda table, header: choose_columns(table, header, configured), read_pair
    )


def choose_columns(table: str, header: Collection[str], configured: Columns = ANY) -> Columns:
    """Returns the columns that are read from a table: the configured names, or common names.

    Configured names are kept. Names that are not configured are taken from the first entry of
    `COMMON` with which the table has a column of documents and another column of summaries. Raises
    DataError if there is no such entry, or if the table lacks a configured column; the message
    lists the columns of the table.
    """
    exist = tables.check_columns(table, header, configured._asdict())
    for common_source, common_target in COMMON:
        source, target = configured.source or common_source, configured.target or common_target
        if source in header and target in header and source != target:
            return Columns(source, target, configured.id or ("id" if "id" in header else ""))
    raise DataError(
        f"{table} has no document and summary under a usual name; {exist}: name two of them with "
        "Data.columns = ('source=COLUMN', 'target=COLUMN')"
    )


def read_pair(row: Row, columns: Columns, number: int) -> Pair | BadRow:
    """Returns the pair in a row, or a BadRow if the row cannot be used.

    `number`, the index of the row, becomes the id of a pair whose row has no id.
    """
    try:
        _check(row.problem)
        source = _source(row.values, columns)
        target = tables.text_of(row.values, columns.target)
        _check("" if source.strip() else "has an empty document")
        _check("" if target.strip() else "has an empty summary")
        name = tables.row_id(row.values.get(columns.id), number)
    except ValueError as problem:
        return BadRow(row.name, str(problem))
    return Pair(row.name, name, source, target)


def _check(problem: str) -> None:
    if problem:
        raise ValueError(problem)


def _source(values: Mapping[str, Any], columns: Columns) -> str:
    utterances, speakers = values.get(columns.source), values.get(SPEAKER)
    if not (isinstance(utterances, list) and isinstance(speakers, list)):
        return tables.text_of(values, columns.source)
    if len(utterances) != len(speakers):
        raise ValueError(f"has {len(utterances)} utterances and {len(speakers)} speakers")
    turns = zip(speakers, utterances, strict=True)
    return " ".join(
        f"{tables.text_value(who, SPEAKER)}: {tables.text_value(what, 'utt')}"
        for who, what in turns
    )
