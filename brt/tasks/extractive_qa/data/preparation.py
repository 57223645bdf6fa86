"""From `config.Questions` to stores of windows: once per content, in the cache."""

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
from brt.tasks.extractive_qa.data.store import QuestionStore, Row
from brt.tasks.extractive_qa.data.windows import tokens_of, windows

TOGETHER = 64  # texts that are tokenized in parallel


class QuestionCorpus(RowCorpus[TextTokenizer, QuestionStore]):
    """Prepared questions, opened."""

    section, rows = "Questions", "questions"


def prepare(section: config.Questions, progress: bool = True) -> QuestionCorpus:
    """Opens the questions that a section describes; prepares them first where that is new.

    Args:
      progress: say on stderr what is done, and what was left out.

    Raises:
      DataError: a source cannot be read as asked.
    """
    return Preparation(section, progress).open()


class Preparation(TextPreparation):
    """Prepares and opens questions."""

    dataset = QuestionCorpus
    kind, endings, version = "Questions", squad.ENDINGS, generated.VERSION

    def open_store(self, directory: Path, encoder: TextTokenizer) -> QuestionStore:
        return QuestionStore.open(directory, encoder)

    def texts(self) -> Iterator[str]:
        """Every context once, and the questions."""
        seen: set[str] = set()
        for row in Tally("train", "").usable(self.read("train")):
            if row.context not in seen:
                seen.add(row.context)
                yield row.context
            yield row.text

    def content(self, row: Question) -> str:
        return row.context

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Question | BadRow]:
        """An id that was there before makes a bad one."""
        seen: set[str] = set()
        no_answer = self.section.no_answer
        for found in made_up.read(
            names, generated.questions, lambda files: squad.read(files, no_answer)
        ):
            if isinstance(found, Question) and found.id in seen:
                yield BadRow(found.name, "has the id of a question before it")
            else:
                yield found
            if isinstance(found, Question):
                seen.add(found.id)

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        section, tokenizer, contexts = self.section, self.tokenizer, _Contexts(self.tokenizer)
        kept: list[Question] = []
        places, questions, rows = [], [], []
        cut = 0
        placed = tally.settled(_placed(self.read(split), contexts), section.errors)
        for group in iter(lambda: list(itertools.islice(placed, TOGETHER)), []):
            encoded = tokenizer.encode([question.text for question, *_ in group])
            for (question, place, answer), spelt in zip(group, encoded, strict=True):
                ids = spelt.ids[: section.max_question_length]
                cut += len(ids) < len(spelt.ids)
                length = len(contexts.spelt[place].ids)
                rows += _rows(section, tokenizer, len(kept), len(ids), length, answer)
                kept.append(question)
                places.append(place)
                questions.append(ids)
        parts = {
            "contexts": [s.ids for s in contexts.spelt],
            "spans": [s.spans for s in contexts.spelt],
            "questions": questions,
        }
        table, columns = np.array(rows, np.int32), {}
        for name, arrays in parts.items():
            columns |= ragged.joined(arrays, np.dtype(np.int32)).columns(name)
        columns |= {"context_of": np.array(places, np.int32), "rows": table}
        texts: dict[str, list[Any]] = {
            "ids": [q.id for q in kept],
            "asked": [q.text for q in kept],
            "answers": [[answer.text for answer in q.answers] for q in kept],
            "texts": list(contexts.places),
        }
        facts = {"texts": list(texts), "rows": tally.report(), "cut": cut}
        store.finish(directory, columns | texts, facts)
        without = sum(not q.answers for q in kept)
        line = f"{len(kept):,} questions about {len(contexts.spelt):,} texts, {len(rows):,} windows"
        line += f" ({(table[:, 3] > 0).sum():,} with the answer)"
        line += f"; {without:,} without an answer" if without else ""
        return line + (f"; cut {cut:,} questions" if cut else "")


class _Contexts:
    """Contexts, each encoded once, in the order in which questions are about them."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self.places: dict[str, int] = {}
        self.spelt: list[Encoding] = []

    def place(self, text: str) -> int:
        if text not in self.places:
            self.places[text] = len(self.spelt)
            self.spelt += self._tokenizer.encode([text])
        return self.places[text]


def _placed(
    rows: Iterable[Question | BadRow], contexts: _Contexts
) -> Iterator[tuple[Question, int, tuple[int, int] | None] | BadRow]:
    """Questions with the place of their context, and the tokens of their first answer there."""
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        place = contexts.place(row.context)
        if not row.answers:
            yield row, place, None
            continue
        text, start = row.answers[0]
        answer = tokens_of(contexts.spelt[place].spans, start, start + len(text))
        if answer is None:
            yield BadRow(row.name, f"has the answer {text[: squad.SHOWN]!r}, which has no token")
        else:
            yield row, place, answer


def _rows(
    section: config.Questions,
    tokenizer: TextTokenizer,
    question: int,
    question_length: int,
    length: int,
    answer: tuple[int, int] | None,
) -> Iterator[Row]:
    """The windows of a question."""
    room = section.max_length - tokenizer.around(2) - question_length
    first = len(tokenizer.begin) + question_length + len(tokenizer.between)
    for start, stop in windows(length, room, section.stride):
        target = (0, 0)
        if answer and start <= answer[0] and answer[1] < stop:
            target = (first + answer[0] - start, first + answer[1] - start)
        yield Row(question, start, stop, *target)
