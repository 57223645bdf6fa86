"""SQuAD's formats and metrics: reads questions, and computes exact match and F1 of answers.

Questions are read from files in the JSON format of SQuAD 1.1 and 2.0, and from tables. A JSON file
has a list `data` of articles, an article has a list `paragraphs`, and a paragraph has a text
`context` and a list `qas` of questions with their answers. A table has a row for each question,
with the columns `id`, `context`, `question` and `answers`. As in the tables of SQuAD on Hugging
Face, `answers` contains two lists: the texts of the answers, and their positions in the context.
The metrics are computed as in SQuAD's official scripts (1.1 and 2.0).
"""

import itertools
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from brt.data import formats, plain_text, tables
from brt.data.quarantine import BadRow
from brt.data.tables import Row
from brt.errors import DataError

ENDINGS = formats.QUESTIONS
SHOWN = 40  # An error quotes at most this number of characters of a text.
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Answer(NamedTuple):
    """An answer within a context."""

    text: str
    start: int  # index of the answer's first character in the context


class Question(NamedTuple):
    """A question about a context."""

    name: str  # file and position of the question, for messages
    id: str  # identifies the question in files of predictions
    context: str  # the text in which the answer has to be found
    text: str
    # Answers that people gave; empty if the context does not contain an answer. Training uses the
    # first answer.
    answers: tuple[Answer, ...]


def read(names: Sequence[str], no_answer: bool) -> Iterator[Question | BadRow]:
    """Yields the questions of all sources in order, and a BadRow for each question with a fault.

    A question without an answer has a fault unless `no_answer` is True. Raises DataError if a
    source cannot be read, contains no question, or has another format.
    """
    for table in (table for name in names for table in tables.tables(name, ENDINGS)):
        empty = True
        for found in _questions(table, no_answer):
            empty = False
            yield found
        if empty:
            raise DataError(f"{table.name} has no question")


def question(
    where: str, context: str, entry: Mapping[str, Any], no_answer: bool
) -> Question | BadRow:
    """Returns the question that an entry of a file describes, or a BadRow if the entry has a fault.

    The entry is an element of the list `qas`, or a row of a table in the same form, with the keys
    "id", "question" and "answers". `where` is the entry's file and position, for messages.
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
    """Returns a phrase that describes the fault of an answer in a file; "" if it has no fault."""
    text = answer.get("text") if isinstance(answer, Mapping) else None
    start = answer.get("answer_start") if isinstance(answer, Mapping) else None
    if not isinstance(text, str) or not text.strip() or not isinstance(start, int):
        return "has an answer without text or answer_start"
    actual = context[start : start + len(text)] if start >= 0 else ""
    if actual == text:
        return ""
    return f"has the answer {text[:SHOWN]!r} at {start}, where its context has {actual[:SHOWN]!r}"


def _questions(table: tables.Table, no_answer: bool) -> Iterator[Question | BadRow]:
    for row in table.rows:
        if row.problem:
            yield BadRow(row.name, row.problem)
        elif "data" in row.values:
            for context, where, entry in _entries(table.name, row.values):
                yield question(where, context, entry, no_answer)
        elif "context" in row.values and "question" in row.values:
            yield _row_question(row, no_answer)
        else:
            raise DataError(
                f"{row.name} has neither SQuAD's list 'data' nor the columns id, context, question "
                f"and answers; it has {', '.join(row.values)}"
            )


def _row_question(row: Row, no_answer: bool) -> Question | BadRow:
    try:
        entry = _decoded(row.values)
        context = tables.text_value(entry["context"], "context")
    except ValueError as problem:
        return BadRow(row.name, str(problem))
    parts = (entry.get(f"answers.{name}") for name in ("text", "answer_start"))
    texts, starts = (part if isinstance(part, list) else [] for part in parts)
    entry["answers"] = entry.get("answers") or [
        {"text": text, "answer_start": start}
        for text, start in itertools.zip_longest(texts, starts)
    ]
    return question(row.name, context, entry, no_answer)


def _decoded(value: Any) -> Any:
    """Returns a value in which arrays are converted to lists, and bytes to text.

    Raises ValueError if bytes are not UTF-8.
    """
    if isinstance(value, Mapping):
        return {name: _decoded(part) for name, part in value.items()}
    if isinstance(value, list | np.ndarray):
        return [_decoded(part) for part in (value if isinstance(value, list) else value.tolist())]
    return tables.text_value(value) if isinstance(value, bytes) else value


def _entries(name: str, content: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields the context, the position (for messages) and the entry of each question of a file."""
    for i, article in enumerate(_list(content, "data", name)):
        for j, paragraph in enumerate(_list(article, "paragraphs", f"{name}: data[{i}]")):
            where = f"{name}: data[{i}].paragraphs[{j}]"
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


class Score(NamedTuple):
    """Exact match (0 or 1) and F1 (from 0 to 1) of one predicted answer."""

    exact: float
    f1: float


def normalized(answer: str) -> str:
    """Returns an answer in the form in which answers are compared: in lower case, without
    punctuation, English articles and repeated spaces.
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def score(prediction: str, answers: Sequence[str]) -> Score:
    """Returns exact match and F1 of a prediction, each the maximum over the true answers.

    As in the script of SQuAD 2.0, answers that are empty after normalisation are left out. If no
    answer remains, the only true answer is "".
    """
    golds = [text for text in answers if normalized(text)] or [""]
    exact = max(normalized(prediction) == normalized(gold) for gold in golds)
    return Score(float(exact), max(f1(prediction, gold) for gold in golds))


def f1(prediction: str, gold: str) -> float:
    """Returns the F1 score (0 to 1) of the words that a predicted answer shares with a true one."""
    predicted, expected = (normalized(text).split() for text in (prediction, gold))
    if not predicted or not expected:
        return float(predicted == expected)
    same = sum((Counter(predicted) & Counter(expected)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(expected)
    return 2 * precision * recall / (precision + recall)
