"""Documents, streamed: a name and its text in chunks, so that a book may exceed the memory."""

import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from brt import untrusted
from brt.config.fields import MEMORY
from brt.data import contents, endings, plain_text, records, sources
from brt.data.memory import documents as memory
from brt.data.quarantine import BadRecord, Quarantine
from brt.data.sources import File

CHUNK = contents.CHUNK  # characters of a record that are handed on at a time


class Document(NamedTuple):
    """One text. `chunks` can be read once, before the next document is asked for."""

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
    """Yields the documents of the sources (see `brt.data.sources`) in order.

    Text is kept as it is, newlines included; only a byte order mark at the start is dropped. The
    ending of a file says what it holds: records and tables hold a document each.

    Args:
      text_field: the field of a JSON record or a TFDS example, the column of a table.
      errors: "replace" reads bytes that are not UTF-8, and NULs, as U+FFFD.
      max_bytes: of a record, and of a text that comes out of a compressed file.
      bad: takes what is damaged; files of text are then read once more, ahead.

    Raises:
      DataError: names the file and what is wrong with it; while chunks are read, too.
    """
    bad = Quarantine() if bad is None else bad
    for source in names:
        if source.startswith("tfds:"):
            for name, text in records.tfds(source, field=text_field, errors=errors, bad=bad):
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
    match kind := endings.kind(file.path.name):
        case "json" | "jsonl":
            yield from _records(file, records.of_json(file, max_bytes=max_bytes, **how), bad)
        case "array_record":
            yield from _records(file, records.array_record(file, max_bytes=max_bytes, **how), bad)
        case "csv" | "tsv" | "parquet":
            yield from _records(file, records.of_table(file, **how), bad)
        case _:

            def text() -> Iterator[str]:
                return _text(file, kind, errors, max_bytes)

            if not bad.most or bad.tried(lambda: deque(text(), maxlen=0), file.name) is not None:
                yield Document(file.name, text())


def _text(file: File, kind: str, errors: str, max_bytes: int) -> Iterator[str]:
    """A file that is one document."""
    if kind == "html":
        raise BadRecord(
            f"{file.name} is HTML; take its text out, as with `pandoc {shlex.quote(file.name)} -t "
            "plain -o NAME.txt`, or name it .txt to learn its marks, too"
        )
    data = contents.text(file)
    if endings.packing(file.path.name):
        data = contents.no_more_than(max_bytes, file.name, data)
    return _with_text(file.name, plain_text.read(file.name, data, errors, plain_text.REPLACE))


def _records(file: File, pairs: Iterator[tuple], bad: Quarantine) -> Iterator[Document]:
    """Those of a file, up to where it is damaged."""
    found = False
    try:
        for document, text in pairs:
            found = True
            yield Document(document, _pieces(text))
        if not found and not bad.knows(file.name):
            raise plain_text.no_text(file.name)
    except BadRecord as error:
        bad.take(error, file.name)


def _pieces(text: str) -> Iterator[str]:
    """A record in parts, of which what counts and encodes them holds one at a time."""
    return (text[start : start + CHUNK] for start in range(0, len(text) or 1, CHUNK))


def _with_text(name: str, chunks: Iterable[str]) -> Iterator[str]:
    """The same chunks; refuses a document of nothing but whitespace."""
    blank = True
    for chunk in chunks:
        blank = blank and not chunk.strip()
        yield chunk
    if blank:
        raise plain_text.no_text(name)
