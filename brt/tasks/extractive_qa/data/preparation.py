"""Prepares questions about texts (contexts), which the config section Questions names.

The questions are read from files, tokenized, and written to a directory of the cache, which has a
store (`QuestionStore`) for each split. Long contexts are cut into windows.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brt import config
from brt.data import generated as made_up
from brt.data.rows import ragged, store
from brt.data.rows.preparation import RowCorpus
from brt.data.rows.tally import BadRow, Tally
from brt.data.texts.preparation import TextPreparation
from brt.data.texts.tokenization import Encoding, TextTokenizer
from brt.tasks.extractive_qa.data import generated, squad
from brt.tasks.extractive_qa.data.squad import Question
from brt.tasks.extractive_qa.data.store import QuestionStore, WindowRow
from brt.tasks.extractive_qa.data.windows import token_range, windows

TOGETHER = 64  # This number of questions is tokenized in parallel.


class QuestionDataset(RowCorpus[TextTokenizer, QuestionStore]):
    """Prepared questions that are opened for reading."""

    rows = "questions"


def prepare(section: config.Questions, progress: bool = True) -> QuestionDataset:
    return Preparation(section, progress).open()


class Preparation(TextPreparation):
    """Prepares and opens the questions that the section Questions of a config describes."""

    dataset = QuestionDataset
    kind, endings, version = "Questions", squad.ENDINGS, generated.VERSION

    def open_store(self, directory: Path, encoder: TextTokenizer) -> QuestionStore:
        return QuestionStore.open(directory, encoder)

    def texts(self) -> Iterator[str]:
        """Yields each training context, once, and each training question."""
        seen: set[str] = set()
        for row in self.training_rows():
            if row.context not in seen:
                seen.add(row.context)
                yield row.context
            yield row.text

    def content(self, row: Question) -> str:
        """Returns the context, so that all questions about a context are in one split."""
        return row.context

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Question | BadRow]:
        """A question that has the id of an earlier question has a fault."""
        seen: set[str] = set()
        no_answer = self.section.no_answer
        for row in made_up.read(
            names, generated.questions, lambda files: squad.read(files, no_answer)
        ):
            if isinstance(row, Question) and row.id in seen:
                yield BadRow(row.name, "has the id of a question before it")
            else:
                yield row
            if isinstance(row, Question):
                seen.add(row.id)

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        section, tokenizer, contexts = self.section, self.tokenizer, _Contexts(self.tokenizer)
        valid: list[Question] = []
        context_of, questions, rows = [], [], []
        cut = 0
        located = tally.refuse_or_skip(_located(self.read(split), contexts), section.errors)
        for group in iter(lambda: list(itertools.islice(located, TOGETHER)), []):
            encoded = tokenizer.encode([question.text for question, *_ in group])
            for (question, context, answer), encoding in zip(group, encoded, strict=True):
                ids = encoding.ids[: section.max_question_length]
                cut += len(ids) < len(encoding.ids)
                length = len(contexts.encodings[context].ids)
                rows += _rows(section, tokenizer, len(valid), len(ids), length, answer)
                valid.append(question)
                context_of.append(context)
                questions.append(ids)
        ragged_columns = {
            "contexts": [encoding.ids for encoding in contexts.encodings],
            "spans": [encoding.spans for encoding in contexts.encodings],
            "questions": questions,
        }
        table, columns = np.array(rows, np.int32), {}
        for name, arrays in ragged_columns.items():
            columns |= ragged.from_rows(arrays, np.dtype(np.int32)).columns(name)
        columns |= {"context_of": np.array(context_of, np.int32), "rows": table}
        texts: dict[str, list[Any]] = {
            "ids": [q.id for q in valid],
            "asked": [q.text for q in valid],
            "answers": [[answer.text for answer in q.answers] for q in valid],
            "texts": list(contexts.indices),
        }
        facts = {"texts": list(texts), "rows": tally.report(), "cut": cut}
        store.finish(directory, columns | texts, facts)
        without, text_count = sum(not q.answers for q in valid), len(contexts.encodings)
        line = f"{len(valid):,} questions about {text_count:,} texts, {len(rows):,} windows"
        line += f" ({(table[:, 3] > 0).sum():,} with the answer)"
        line += f"; {without:,} without an answer" if without else ""
        return line + (f"; cut {cut:,} questions" if cut else "")


class _Contexts:
    """The encoded contexts, each once, in the order in which they first occur."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self.indices: dict[str, int] = {}
        self.encodings: list[Encoding] = []

    def index(self, text: str) -> int:
        """Returns the index of a context, which is encoded and added if it is new."""
        if text not in self.indices:
            self.indices[text] = len(self.encodings)
            self.encodings += self._tokenizer.encode([text])
        return self.indices[text]


def _located(
    rows: Iterable[Question | BadRow], contexts: _Contexts
) -> Iterator[tuple[Question, int, tuple[int, int] | None] | BadRow]:
    """Yields questions with the index of their context and the token span of their first answer."""
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        context = contexts.index(row.context)
        if not row.answers:
            yield row, context, None
            continue
        text, start = row.answers[0]
        answer = token_range(contexts.encodings[context].spans, start, start + len(text))
        if answer is None:
            yield BadRow(row.name, f"has the answer {text[: squad.SHOWN]!r} without any token")
        else:
            yield row, context, answer


def _rows(
    section: config.Questions,
    tokenizer: TextTokenizer,
    question: int,
    question_length: int,
    length: int,
    answer: tuple[int, int] | None,
) -> Iterator[WindowRow]:
    """Yields the windows of a question.

    `question` is its index, `length` the number of tokens of its context, and `answer` the answer's
    first and last token in the context.
    """
    room = section.max_length - tokenizer.special_count(2) - question_length
    first = len(tokenizer.begin) + question_length + len(tokenizer.between)
    for start, stop in windows(length, room, section.stride):
        target = (0, 0)
        if answer and start <= answer[0] and answer[1] < stop:
            target = (first + answer[0] - start, first + answer[1] - start)
        yield WindowRow(question, start, stop, *target)
