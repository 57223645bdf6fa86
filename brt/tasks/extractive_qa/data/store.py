"""The questions of a split, cut into windows (see `brt.data.rows.store`)."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from brt.data.rows import store
from brt.data.rows.ragged import Ragged
from brt.data.rows.store import RowStore
from brt.data.texts.tokenization import TextTokenizer


class Row(NamedTuple):
    """A window of a question: tokens of its context from `start` to before `stop`.

    Attributes:
      answer_start, answer_end: first and last token of the answer, counted in the window as a
        model reads it; 0, the first special token, where the window does not hold all of it.
    """

    question: int
    start: int
    stop: int
    answer_start: int
    answer_end: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuestionStore(RowStore):
    """Contexts and questions as ids, and windows of them.

    Attributes:
      contexts: int32 ids of each context; spans: [T, 2], the characters of each id.
      questions: int32 ids of each question, cut.
      context_of: int32 [questions].
      rows: int32 [rows, 5], fields of `Row`.
      ids, asked, answers: of each question: what predictions call it, its text, what people
        answered; () for none.
      texts: of the contexts.
    """

    tokenizer: TextTokenizer
    contexts: Ragged
    spans: Ragged
    questions: Ragged
    context_of: Int[np.ndarray, " questions"]
    rows: Int[np.ndarray, "rows 5"]
    asked: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]
    texts: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path, tokenizer: TextTokenizer) -> "QuestionStore":
        """Raises DataError where it is missing, unfinished or damaged."""
        names = ("context_of", "rows", "ids", "asked", "texts")
        with store.opened(directory, facts={"rows": {"bad": int}}) as found:
            parts = {name: found.ragged(name) for name in ("contexts", "spans", "questions")}
            columns = {name: found.columns[name] for name in names}
            answers = tuple(map(tuple, found.columns["answers"]))
            contexts, asked = len(parts["contexts"]), len(parts["questions"])
            store.within("context_of", columns["context_of"], contexts)
            lengths = parts["contexts"].lengths[columns["context_of"]]
            rows = columns["rows"].reshape(-1, len(Row._fields))
            store.within("rows", rows[:, 0], asked)
            store.within("rows", rows[:, 2] - rows[:, 1], rows[:, 2] + 1)
            store.within("rows", rows[:, 2], lengths[rows[:, 0]] + 1)
            if {*map(len, (answers, columns["asked"], lengths))} != {asked}:
                raise ValueError("its columns have other lengths")
        return cls(
            directory=directory, manifest=found.manifest, tokenizer=tokenizer, answers=answers,
            **parts, **columns,
        )  # fmt: skip

    def __len__(self) -> int:
        """How many windows."""
        return len(self.rows)

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        """Tokens of each window as a model reads it."""
        questions = self.questions.lengths[self.rows[:, 0]]
        return questions + self.rows[:, 2] - self.rows[:, 1] + self.tokenizer.around(2)

    def row(self, row: int | np.integer) -> Row:
        """A window."""
        return Row(*self.rows[row].tolist())

    def tokens(self, row: int | np.integer) -> Int[np.ndarray, " T"]:
        """The ids that a model reads of a window."""
        question, start, stop = self.rows[row, :3]
        context = self.contexts[self.context_of[question]][start:stop]
        return self.tokenizer.wrap(self.questions[question], context)

    read = tokens

    @property
    def row_targets(self) -> Int[np.ndarray, "rows 2"]:
        """What a model says of each window: the first and last token of the answer."""
        return self.rows[:, 3:]

    def first(self, row: int | np.integer) -> int:
        """Where the context begins in a window."""
        tokenizer = self.tokenizer
        around = len(tokenizer.begin) + len(tokenizer.between)
        return around + len(self.questions[self.rows[row, 0]])

    def inside(self, rows: np.ndarray, length: int) -> Bool[np.ndarray, "B T"]:
        """Which tokens of some windows are of the context; -1 is an empty row."""
        found = np.zeros((len(rows), length), bool)
        for i, row in enumerate(rows):
            if row >= 0:
                first, (_, start, stop, *_) = self.first(row), self.row(row)
                found[i, first : first + stop - start] = True
        return found

    def text(self, row: int | np.integer, start: int, end: int) -> str:
        """The characters of tokens of a window, both included, without spaces around them."""
        found = self.row(row)
        if found.start == found.stop:
            return ""
        context = int(self.context_of[found.question])
        move = found.start - self.first(row)
        spans = self.spans[context]
        return self.texts[context][spans[start + move, 0] : spans[end + move, 1]].strip()
