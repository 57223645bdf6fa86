"""Reads questions from files in the JSON format of SQuAD 1.1 and 2.0.

A file has a list `data` of articles, an article has a list `paragraphs`, and a paragraph has a text
`context` and a list `qas` of questions with their answers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import contents, plain_text, sources
from brt.data.rows.tally import BadRow
from brt.data.sources import File
from brt.errors import DataError

ENDINGS = (".json",)
SHOWN = 40  # An error quotes at most this number of characters of a text.


class Answer(NamedTuple):
    """An answer within a context.

    Attributes:
      text: the text of the answer.
      start: index of the answer's first character in the context.
    """

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context.

    Attributes:
      name: file and position of the question, for messages.
      id: identifier of the question in files of predictions.
      context: the text in which the answer has to be found.
      text: the text of the question.
      answers: answers that people gave; empty if the context does not contain an answer. Training
        uses the first answer.
    """

    name: str
    id: str
    context: str
    text: str
    answers: tuple[Answer, ...]


def read(names: Sequence[str], no_answer: bool) -> Iterator[Question | BadRow]:
    """Yields the questions of all sources in order, and a BadRow for each question with a fault.

    Args:
      names: names of the sources, such as paths of files in SQuAD's format.
      no_answer: True accepts questions without an answer; otherwise they have a fault.

    Raises:
      DataError: a source cannot be read, contains no question, or has another format.
    """
    for file in (file for name in names for file in sources.files(name, ENDINGS)):
        empty = True
        for context, where, entry in _entries(file):
            empty = False
            yield question(where, context, entry, no_answer)
        if empty:
            raise DataError(f"{file.name} has no question")


def question(
    where: str, context: str, entry: Mapping[str, Any], no_answer: bool
) -> Question | BadRow:
    """Returns the question that an entry of a file describes, or a BadRow if the entry has a fault.

    Args:
      where: file and position of the entry, for messages.
      context: the text in which the answer has to be found.
      entry: an element of the list `qas` in the file, with the keys "id", "question" and "answers".
      no_answer: True accepts a question without an answer.
    """
    id, text = entry.get("id"), entry.get("question")
    if not isinstance(id, str | int | float):
        return BadRow(where, "has no id")
    if problem := plain_text.problem(str(id)):
        return BadRow(where, f"{problem} of its id")
    id = str(int(id) if isinstance(id, float) and id.is_integer() else id)
    name = f"{where} ({id})"
    if not isinstance(text, str) or not text.strip():
        return BadRow(name, "has no question")
    if not context.strip():
        return BadRow(name, "has an empty context")
    for what, value in (("question", text), ("context", context)):
        if problem := plain_text.problem(value):
            return BadRow(name, f"{problem} of its {what}")
    entries = entry.get("answers")
    if entry.get("is_impossible") or not entries:
        if not no_answer:
            return BadRow(name, "has no answer; Questions.no_answer = True would allow that")
        return Question(name, id, context, text, ())
    answers = []
    for answer in entries if isinstance(entries, list) else [entries]:
        if problem := _problem(answer, context):
            return BadRow(name, problem)
        answers.append(Answer(answer["text"], answer["answer_start"]))
    return Question(name, id, context, text, tuple(answers))


def _problem(answer: Any, context: str) -> str:
    """Returns a phrase about a fault of a member of `answers`; "" if it has no fault."""
    text = answer.get("text") if isinstance(answer, Mapping) else None
    start = answer.get("answer_start") if isinstance(answer, Mapping) else None
    if not isinstance(text, str) or not text.strip() or not isinstance(start, int):
        return "has an answer without text or answer_start"
    actual = context[start : start + len(text)] if start >= 0 else ""
    if actual == text:
        return ""
    return f"has the answer {text[:SHOWN]!r} at {start}, where its context has {actual[:SHOWN]!r}"


def _entries(file: File) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields each question of a file: its context, its position for messages, and its entry."""
    try:
        data = contents.no_more_than(untrusted.LARGEST, file.name, contents.text(file))
        content = untrusted.parse_json("".join(plain_text.read(file.name, data)), halves="keep")
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file.name} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from error
    for i, article in enumerate(_list(content, "data", file.name)):
        for j, paragraph in enumerate(_list(article, "paragraphs", f"{file.name}: data[{i}]")):
            where = f"{file.name}: data[{i}].paragraphs[{j}]"
            if not isinstance(paragraph, Mapping) or not isinstance(paragraph.get("context"), str):
                raise DataError(f"{where} has no text 'context', as SQuAD's files have")
            for k, entry in enumerate(_list(paragraph, "qas", where)):
                if not isinstance(entry, Mapping):
                    raise DataError(f"{where}.qas[{k}] is no JSON object, as SQuAD's files have")
                yield paragraph["context"], f"{where}.qas[{k}]", entry


def _list(holder: Any, name: str, where: str) -> list[Any]:
    members = holder.get(name) if isinstance(holder, Mapping) else None
    if not isinstance(members, list):
        raise DataError(f"{where} has no list '{name}', as SQuAD's files have")
    return members
