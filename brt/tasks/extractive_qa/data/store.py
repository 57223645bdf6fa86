"""Stores of questions on disk, with the texts (contexts) that contain the answers.

The contexts are cut into windows; a row of the store is a window together with a question. The
files of a store are described in `brt.data.rows.store`.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from brt.data.rows import store
from brt.data.rows.ragged import Ragged
from brt.data.rows.store import RowStore
from brt.data.texts.tokenization import TextTokenizer


class WindowRow(NamedTuple):
    """A window: a question, and a range of tokens of the question's context."""

    question: int  # index of the question in the store
    start: int  # index in the context of the window's first token
    stop: int  # index of the token after the window's last one
    # Positions of the first and last token of the answer in the model's input; 0, the first special
    # token, if the window does not contain the whole answer.
    answer_start: int
    answer_end: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuestionStore(RowStore):
    """Encoded contexts and questions of a split, and the windows into which contexts are cut."""

    tokenizer: TextTokenizer
    contexts: Ragged  # token ids, int32 [T]
    # For each context, int32 [T, 2]: the index of the first character that each token stands for,
    # and of the character after the last one.
    spans: Ragged
    questions: Ragged  # token ids, int32 [T], cut to the maximum length
    context_of: Int[np.ndarray, " questions"]  # index of each question's context
    rows: Int[np.ndarray, "rows 5"]  # the columns are the fields of `WindowRow`
    asked: tuple[str, ...]  # the text of each question
    answers: tuple[tuple[str, ...], ...]  # true answers to each question; may be empty
    texts: tuple[str, ...]  # the text of each context

    @classmethod
    def open(cls, directory: Path, tokenizer: TextTokenizer) -> "QuestionStore":
        names = ("context_of", "rows", "ids", "asked", "texts")
        with store.opened(directory, facts={"rows": {"bad": int}}) as opened:
            parts = {name: opened.ragged(name) for name in ("contexts", "spans", "questions")}
            columns = {name: opened.columns[name] for name in names}
            answers = tuple(map(tuple, opened.columns["answers"]))
            contexts, asked = len(parts["contexts"]), len(parts["questions"])
            store.check_indices("context_of", columns["context_of"], contexts)
            lengths = parts["contexts"].lengths[columns["context_of"]]
            rows = columns["rows"].reshape(-1, len(WindowRow._fields))
            store.check_indices("rows", rows[:, 0], asked)
            store.check_indices("rows", rows[:, 2] - rows[:, 1], rows[:, 2] + 1)
            store.check_indices("rows", rows[:, 2], lengths[rows[:, 0]] + 1)
            if {*map(len, (answers, columns["asked"], lengths))} != {asked}:
                raise ValueError("its columns have different lengths")
        return cls(
            directory=directory, manifest=opened.manifest, tokenizer=tokenizer, answers=answers,
            **parts, **columns,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        """Number of token ids that the model reads for each window, including the question."""
        questions = self.questions.lengths[self.rows[:, 0]]
        return questions + self.rows[:, 2] - self.rows[:, 1] + self.tokenizer.special_count(2)

    def window(self, index: int | np.integer) -> WindowRow:
        return WindowRow(*self.rows[index].tolist())

    def tokens(self, row: int | np.integer) -> Int[np.ndarray, " T"]:
        """Returns the token ids that the model reads for a window: the question and the window's
        part of the context, with special ids.
        """
        question, start, stop = self.rows[row, :3]
        context = self.contexts[self.context_of[question]][start:stop]
        return self.tokenizer.wrap(self.questions[question], context)

    read = tokens

    @property
    def row_targets(self) -> Int[np.ndarray, "rows 2"]:
        """The fields `answer_start` and `answer_end` of each window, which the model predicts."""
        return self.rows[:, 3:]

    def context_start(self, row: int | np.integer) -> int:
        """Returns the position of the context's first token in the model's input for a window."""
        tokenizer = self.tokenizer
        around = len(tokenizer.begin) + len(tokenizer.between)
        return around + len(self.questions[self.rows[row, 0]])

    def context_mask(self, rows: np.ndarray, length: int) -> Bool[np.ndarray, "B T"]:
        """Returns a mask of the inputs of windows that is True for the tokens of the context, of
        which alone a predicted answer may consist.

        `rows` are indices of windows; -1 is an empty row, whose mask is False. Inputs are padded to
        `length` tokens.
        """
        mask = np.zeros((len(rows), length), bool)
        for i, row in enumerate(rows):
            if row >= 0:
                first, (_, start, stop, *_) = self.context_start(row), self.window(row)
                mask[i, first : first + stop - start] = True
        return mask

    def text(self, row: int | np.integer, start: int, end: int) -> str:
        """Returns the text, without spaces at its ends, of the tokens with the positions `start` to
        `end` (inclusive) in the input of a window.
        """
        window = self.window(row)
        if window.start == window.stop:
            return ""
        context = int(self.context_of[window.question])
        offset = window.start - self.context_start(row)
        spans = self.spans[context]
        return self.texts[context][spans[start + offset, 0] : spans[end + offset, 1]].strip()
