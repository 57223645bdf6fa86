"""Reads documents from sources as streams, so that a document may be larger than the memory.

In JSON files, ArrayRecord files, TensorFlow datasets and tables, each record is a document. Records
are held in memory, where they take up to four times their size. One field (or column) of a record
has the text; the record may also be a pair of texts, or a conversation.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from brt import untrusted
from brt.config.fields import MEMORY
from brt.data import chat, contents, formats, memory_tasks, plain_text, sources, tables
from brt.data.contents import Record
from brt.data.plain_text import REPLACE
from brt.data.quarantine import BadRecord, Quarantine
from brt.data.sources import File
from brt.data.tables import Row
from brt.errors import DataError

CHUNK = contents.CHUNK  # The text of a record is cut into chunks of this number of characters.
READ_RECORDS = 64  # This number of records is fetched from an ArrayRecord file at a time.
_PAIR = "Data.columns = ('prompt=FIELD', 'completion=FIELD')"
_REMEDY = {
    "text": "Data.columns = ('text=FIELD',)", "messages": "Data.columns = ('messages=FIELD',)",
    "prompt": _PAIR, "completion": _PAIR,
}  # fmt: skip
_SHOWN = 20  # An error message lists at most this number of fields.


class Pair(NamedTuple):
    """A text to read, and the text that completes it."""

    prompt: str
    completion: str


Messages = list[dict[str, str]]


class Document(NamedTuple):
    """A document's name and text. Its chunks must be read before the next document is requested."""

    name: str
    chunks: Iterator[str]
    # The pair or the messages of which only a part is learned; None if the whole text is learned.
    # `chunks` has the same content: the concatenated pair, or the messages as JSON.
    parts: Pair | Messages | None = None


class Fields(NamedTuple):
    """The names of the fields of a record; "" stands for no field.

    Records are pairs if `prompt` is given, conversations if `messages` is given, otherwise texts.
    """

    text: str = "text"
    prompt: str = ""
    completion: str = ""
    separator: str = ""  # the text between prompt and completion
    messages: str = ""

    @property
    def are_parts(self) -> bool:
        return bool(self.prompt or self.messages)


TEXT = Fields()


def read(
    names: Sequence[str],
    *,
    fields: Fields = TEXT,
    errors: str = "strict",
    max_bytes: int = untrusted.LARGEST,
    bad: Quarantine | None = None,
) -> Iterator[Document]:
    """Yields the documents of sources in order; `brt.data.sources` describes the names of sources.

    Text is not changed, except that a byte order mark at the start is removed. The suffix of a file
    determines how the file is read: every record of a JSON file and every row of a table is a
    document; a file of another kind is a single document.

    Args:
      fields: the names of the fields (of JSON records and TFDS examples) or columns (of tables)
        that contain the text. If they name pairs or conversations, all sources must have these.
      errors: "replace" reads NULs and bytes that are not UTF-8 as U+FFFD; with "strict", a document
        that contains them counts as damaged.
      max_bytes: the largest size of a record, and of the text of a compressed file.
      bad: collects damaged documents; None raises an error for the first one. If the limit of `bad`
        is above zero, text files are read twice, the first time only to find damage.

    Raises:
      DataError: a file is damaged or cannot be read. The error may also occur while the chunks of a
        document are read.
    """
    bad = Quarantine() if bad is None else bad
    for source in names:
        if source.startswith("tfds:"):
            examples = _numbered(tables.examples(source))
            yield from _documents(source, examples, fields, errors, bad)
        elif fields.are_parts and source.startswith(MEMORY):
            raise _no_columns(source)
        elif source.startswith(MEMORY):
            novels = "\n".join(file.path.read_text("utf-8") for file in sources.files(source))
            for name, text in memory_tasks.documents(source, novels):
                yield Document(name, iter([text]))
        else:
            for file in sources.files(source):
                yield from _read_file(file, fields, errors, max_bytes, bad)


def _read_file(
    file: File, fields: Fields, errors: str, max_bytes: int, bad: Quarantine
) -> Iterator[Document]:
    match formats.kind(file.path.name):
        case "json" | "jsonl":
            records = contents.read_json(file, errors=errors, max_bytes=max_bytes)
            yield from _documents(file.name, records, fields, errors, bad, unit="line")
        case "array_record":
            records = _array_records(file, errors, max_bytes)
            yield from _documents(file.name, records, fields, errors, bad)
        case "csv" | "tsv" | "parquet" | "arrow":
            yield from _documents(file.name, _numbered(tables.rows(file)), fields, errors, bad)
        case _ if fields.are_parts:
            bad.collect(_no_columns(file.name), file.name)
        case _:

            def text() -> Iterator[str]:
                return _text(file, errors, max_bytes)

            def is_readable() -> bool:
                deque(text(), maxlen=0)
                return True

            # If bad records are collected, the whole file is read once before its document is
            # yielded, because parts of a document that are already stored cannot be taken back.
            if not bad.limit or bad.call_and_collect(is_readable, file.name):
                yield Document(file.name, text())


def _text(file: File, errors: str, max_bytes: int) -> Iterator[str]:
    """Yields the text of a file; raises BadRecord if all of it is whitespace."""
    data, blank = contents.text(file), True
    if formats.compression_suffix(file.path.name):
        data = contents.no_more_than(max_bytes, file.name, data)
    for chunk in plain_text.read(file.name, data, errors, REPLACE):
        blank = blank and not chunk.strip()
        yield chunk
    if blank:
        raise plain_text.no_text(file.name)


def _documents(
    file: str,
    records: Iterator[Record],
    fields: Fields,
    errors: str,
    bad: Quarantine,
    unit: str = "record",
) -> Iterator[Document]:
    """Yields the documents of a file, up to the place where the file is damaged."""
    has_text = False
    try:
        for record in records:
            read = partial(_document, record, fields, errors)
            document = bad.call_and_collect(read, file, **{unit: record.number})
            if document is not None:
                has_text = True
                yield document
        if not has_text and not bad.knows(file):
            raise plain_text.no_text(file)
    except BadRecord as error:
        bad.collect(error, file)


def _no_columns(name: str) -> BadRecord:
    return BadRecord(
        f"{name} has no columns, and Data.columns names some for pairs; leave it out, or write it "
        "as JSON lines"
    )


def _pieces(text: str) -> Iterator[str]:
    """Cuts the text of a record into chunks, so that later stages hold one chunk at a time."""
    return (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


def _numbered(rows: Iterable[Row]) -> Iterator[Record]:
    for number, row in enumerate(rows):
        yield Record(row.name, number, row.values, row.problem)


def _array_records(file: File, errors: str, max_bytes: int) -> Iterator[Record]:
    """Reads an ArrayRecord file, whose records are UTF-8 texts or JSON objects."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(file.path))
        count = reader.num_records()
        if count == 0:
            raise BadRecord(f"{file.name} is not an ArrayRecord file, or has no record")
        for start in range(0, count, READ_RECORDS):
            for i, data in enumerate(reader.read(start, min(start + READ_RECORDS, count)), start):
                name = f"{file.name}:{i}"
                if len(data) > max_bytes:
                    raise contents.too_large(name, max_bytes)
                is_json = data.lstrip()[:1] == b"{"
                record = contents.parse_json(name, i, data, errors)
                yield record if is_json else Record(name, i, data)
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise BadRecord(f"{file.name} is damaged: {str(error).partition(';')[0]}") from error


def _document(record: Record, fields: Fields, errors: str) -> Document:
    name, value = record.name, record.value
    if record.problem:
        remedy = "" if ";" in record.problem else "; repair it"
        if "UTF-8 at byte" in record.problem:
            remedy = f"; repair it, or read such bytes as U+FFFD with {REPLACE}"
        raise BadRecord(f"{name} {record.problem}{remedy}")
    if fields.messages:
        messages = _messages(name, value, fields.messages, errors)
        return Document(name, _pieces(json.dumps(messages, ensure_ascii=False)), messages)
    if fields.prompt:
        prompt, completion = (
            _joined(
                f"the {role} of {name}", _field(name, value, getattr(fields, role), role), errors
            )
            for role in ("prompt", "completion")
        )
        pair = Pair(prompt + fields.separator, completion)
        return Document(name, _pieces("".join(pair)), pair)
    if not isinstance(value, str | bytes):  # Otherwise, the whole record is a text.
        value = _field(name, value, fields.text)
    return Document(name, _pieces(_joined(name, value, errors)))


def _messages(name: str, value: Any, field: str, errors: str) -> Messages:
    """Returns the conversation in a field of a record; raises BadRecord if it has no answer."""
    found = tables.flat(value).get(field) if isinstance(value, Mapping) else None
    if found is None:
        raise BadRecord(
            f"{name} has no field '{field}'; name the field of conversations with "
            f"{_REMEDY['messages']}, or leave it out"
        )
    if isinstance(found, list):  # In tables, texts are bytes, which are decoded here.
        found = [
            {key: _part(name, v, errors) if isinstance(v, bytes) else v for key, v in each.items()}
            if isinstance(each, Mapping) else each
            for each in found
        ]  # fmt: skip
    try:
        messages = chat.checked(found)
    except DataError as error:
        raise BadRecord(f"{name}: {error}") from error
    roles = [message["role"] for message in messages]
    if chat.ASSISTANT not in roles[1:] or roles[0] == chat.ASSISTANT:
        raise BadRecord(
            f"{name} has a conversation of {', '.join(roles):.80}, in which the assistant does not "
            "answer, or speaks first; leave it out"
        )
    return messages


def _joined(name: str, value: Any, errors: str) -> str:
    """Returns the text in a field, which may be a list of texts."""
    parts = value if isinstance(value, list) else [value]
    text = "\n".join(_part(name, part, errors) for part in parts)
    if not text.strip():
        raise plain_text.no_text(name)
    if fault := plain_text.binary(plain_text.unreadable(text), len(text)):
        raise BadRecord(f"{name} {fault}")
    text = plain_text.without_nul(name, text, errors, remedy=REPLACE)
    if problem := plain_text.problem(text):
        raise BadRecord(f"{name} {problem}; repair it, or read it as U+FFFD with {REPLACE}")
    return text


def _part(name: str, value: Any, errors: str) -> str:
    if isinstance(value, bytes):
        value = plain_text.decoded(name, value, errors, REPLACE)
    if not isinstance(value, str):
        raise BadRecord(f"{name} holds {tables.type_name(value)}, not text; leave it out")
    return value.removeprefix(plain_text.MARK)


def _field(name: str, example: Any, field: str, role: str = "text") -> Any:
    """Returns the value of a field; raises BadRecord if the field is missing or is not text."""
    if not isinstance(example, Mapping):
        raise BadRecord(f"{name} is not an object with a field '{field}'; leave it out")
    values = tables.flat(example)
    value = values.get(field)
    if _is_text(value):
        return value
    problem = f" has no field '{field}'"
    if field in values:
        problem = f": the field '{field}' is {tables.type_name(value)}, not text"
    texts = [other for other in sorted(values)[:_SHOWN] if _is_text(values[other])]
    remedy = "write the texts to one field, or leave it out"
    if not texts:
        raise BadRecord(f"{name}{problem}, and no other field has text; {remedy}")
    raise BadRecord(
        f"{name}{problem}; name one of {texts} with {_REMEDY[role]} if every record has it, "
        f"otherwise {remedy}"
    )


def _is_text(value: Any) -> bool:
    """Returns True for a text and for a list of texts."""
    parts = value if isinstance(value, list) and value else [value]
    return all(isinstance(part, str | bytes) for part in parts)
