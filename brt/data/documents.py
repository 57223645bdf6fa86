"""Reads documents from sources as streams, so that a document may be larger than the memory."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from brt import untrusted
from brt.config.fields import MEMORY
from brt.data import contents, endings, plain_text, records, sources
from brt.data.memory import documents as memory
from brt.data.quarantine import BadRecord, Quarantine
from brt.data.sources import File

CHUNK = contents.CHUNK  # The text of a record is cut into chunks of this number of characters.


class Document(NamedTuple):
    """A document's name and text. Its chunks must be read before the next document is requested."""

    name: str
    chunks: Iterator[str]


def read(
    names: Sequence[str],
    *,
    text_field: str = "text",
    errors: str = "strict",
    max_bytes: int = untrusted.LARGEST,
    bad: Quarantine | None = None,
) -> Iterator[Document]:
    """Yields the documents of sources in order; `brt.data.sources` describes the names of sources.

    Text is not changed, except that a byte order mark at the start is removed. The suffix of a file
    determines how the file is read: every record of a JSON file and every row of a table is a
    document; a file of another kind is a single document.

    Args:
      text_field: the field of a JSON record or TFDS example, or the column of a table, that
        contains the text.
      errors: "replace" reads NULs and bytes that are not UTF-8 as U+FFFD; with "strict", a document
        that contains them counts as damaged.
      max_bytes: the largest size of a record, and of the text of a compressed file.
      bad: collects damaged documents; None raises an error for the first one. If the limit of `bad`
        is above zero, text files are read twice, first to find out whether they are damaged.

    Raises:
      DataError: a file is damaged or cannot be read. The error may also occur while the chunks of a
        document are read.
    """
    bad = Quarantine() if bad is None else bad
    for source in names:
        if source.startswith("tfds:"):
            for name, text in records.tfds_texts(source, field=text_field, errors=errors, bad=bad):
                yield Document(name, _pieces(text))
            continue
        if source.startswith(MEMORY):
            for name, text in memory.documents(source):
                yield Document(name, iter([text]))
            continue
        for file in sources.files(source):
            yield from _read_file(file, text_field, errors, max_bytes, bad)


def _read_file(
    file: File, field: str, errors: str, max_bytes: int, bad: Quarantine
) -> Iterator[Document]:
    how: dict[str, Any] = {"field": field, "errors": errors, "bad": bad}
    match endings.kind(file.path.name):
        case "json" | "jsonl":
            yield from _records(file, records.json_texts(file, max_bytes=max_bytes, **how), bad)
        case "array_record":
            yield from _records(
                file, records.array_record_texts(file, max_bytes=max_bytes, **how), bad
            )
        case "csv" | "tsv" | "parquet" | "arrow":
            yield from _records(file, records.table_texts(file, **how), bad)
        case _:

            def text() -> Iterator[str]:
                return _text(file, errors, max_bytes)

            def is_readable() -> bool:
                deque(text(), maxlen=0)
                return True

            if not bad.most or bad.call_and_collect(is_readable, file.name):
                yield Document(file.name, text())


def _text(file: File, errors: str, max_bytes: int) -> Iterator[str]:
    data = contents.text(file)
    if endings.compression_suffix(file.path.name):
        data = contents.no_more_than(max_bytes, file.name, data)
    return _with_text(file.name, plain_text.read(file.name, data, errors, plain_text.REPLACE))


def _records(file: File, pairs: Iterator[tuple], bad: Quarantine) -> Iterator[Document]:
    """Yields the documents of a file, up to the place where the file is damaged."""
    has_text = False
    try:
        for document, text in pairs:
            has_text = True
            yield Document(document, _pieces(text))
        if not has_text and not bad.knows(file.name):
            raise plain_text.no_text(file.name)
    except BadRecord as error:
        bad.collect(error, file.name)


def _pieces(text: str) -> Iterator[str]:
    """Cuts the text of a record into chunks, so that later stages hold one chunk at a time."""
    return (text[start : start + CHUNK] for start in range(0, len(text) or 1, CHUNK))


def _with_text(name: str, chunks: Iterable[str]) -> Iterator[str]:
    """Yields the chunks of a text unchanged; raises BadRecord if all of them are whitespace."""
    blank = True
    for chunk in chunks:
        blank = blank and not chunk.strip()
        yield chunk
    if blank:
        raise plain_text.no_text(name)
