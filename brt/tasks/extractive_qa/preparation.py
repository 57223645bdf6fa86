"""Prepares questions about texts (contexts), which the config section Questions names.

The questions are read from files or generated, tokenized, and written to a directory of the cache,
which has a store (`QuestionStore`) for each split. Long contexts are cut into windows; a row of a
store is a window together with a question.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from brt import config
from brt.data import generated, stores
from brt.data.preparation import Corpus, TextPreparation, in_groups
from brt.data.quarantine import BadRow, Tally
from brt.data.stores import Ragged, RowStore
from brt.data.text_tokenizers import Encoding, TextTokenizer
from brt.tasks.extractive_qa import squad
from brt.tasks.extractive_qa.squad import Answer, Question

# The hash of a generated source depends on this number. The number must be increased if the
# generated text changes, so that data in the cache are prepared again.
VERSION = 1
KEYS, VALUES, FILLERS = 24, 36, 36


def questions(source: str) -> Iterator[Question]:
    """Yields the questions of a source `generated:NAME/COUNT`; NAME determines all of them.

    They are for tests and examples, and the same on every machine. A context consists of five to
    eight facts such as "banana is gofuna rilo .", separated by random words of a fixed lexicon. In
    this fact, "banana" is the key and "gofuna rilo" is the value. A value has one or two words. The
    question about this fact is "what is banana ?", and the answer is the value. The other facts of
    the context have other keys, so a model has to find the key of the question.
    """
    name, count = generated.parse(source)
    lexicon = generated.words(f"questions {VERSION}", KEYS + VALUES + FILLERS)
    keys, values, fillers = lexicon[:KEYS], lexicon[KEYS:-FILLERS], lexicon[-FILLERS:]
    for number in range(count):
        draw = generated.draw(f"questions {VERSION} {name}/{number}")
        chosen = draw.choice(KEYS, draw.randint(5, 9), replace=False)
        asked, context, answer = draw.randint(len(chosen)), "", Answer("", 0)
        for index, key in enumerate(chosen):
            for word in draw.randint(FILLERS, size=draw.randint(2, 7)):
                context += f"{fillers[word]} "
            context += f"{keys[key]} is "
            value = " ".join(values[i] for i in draw.randint(VALUES, size=draw.randint(1, 3)))
            if index == asked:
                answer = Answer(value, len(context))
            context += f"{value} . "
        id = f"{name}-{number:05}"
        text = f"what is {keys[chosen[asked]]} ?"
        yield Question(id, id, context.strip(), text, (answer,))


class WindowRow(NamedTuple):
    """A window: a question, and a range of tokens of the question's context."""

    question: int  # index of the question in the store
    start: int  # index of the window's first token in the context
    stop: int  # index of the token after the window's last token
    # Positions of the answer's first and last token in the model's input. Both are 0, the position
    # of the first special token, if the window does not contain the whole answer.
    answer_start: int
    answer_end: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuestionStore(RowStore):
    """Encoded contexts and questions of a split, and the windows into which contexts are cut."""

    tokenizer: TextTokenizer
    contexts: Ragged  # token ids, int32 [T]
    # For each context, int32 [T, 2]: the index of the first character that a token stands for, and
    # the index of the character after the token's last character.
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
        with stores.opened(directory, facts={"rows": {"bad": int}}) as opened:
            parts = {name: opened.ragged(name) for name in ("contexts", "spans", "questions")}
            columns = {name: opened.columns[name] for name in names}
            answers = tuple(map(tuple, opened.columns["answers"]))
            contexts, asked = len(parts["contexts"]), len(parts["questions"])
            stores.check_indices("context_of", columns["context_of"], contexts)
            lengths = parts["contexts"].lengths[columns["context_of"]]
            rows = columns["rows"].reshape(-1, len(WindowRow._fields))
            stores.check_indices("rows", rows[:, 0], asked)
            stores.check_indices("rows", rows[:, 2] - rows[:, 1], rows[:, 2] + 1)
            stores.check_indices("rows", rows[:, 2], lengths[rows[:, 0]] + 1)
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
        """Returns a mask of the inputs of windows that is True for the tokens of the context.

        A predicted answer may contain only these tokens.
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
        """Returns the text of the tokens from `start` to `end`, without spaces at its ends.

        `start` and `end` are the positions of the first and the last token in a window's input.
        """
        window = self.window(row)
        if window.start == window.stop:
            return ""
        context = int(self.context_of[window.question])
        offset = window.start - self.context_start(row)
        spans = self.spans[context]
        return self.texts[context][spans[start + offset, 0] : spans[end + offset, 1]].strip()


def windows(length: int, size: int, overlap: int) -> list[range]:
    """Returns windows of at most `size` tokens that cover a text of `length` tokens.

    A window is the range of the indices of its tokens. Neighbouring windows share `overlap` tokens,
    which is less than `size`. An empty text has one empty window.
    """
    cuts = [range(min(size, length))]
    while cuts[-1].stop < length:
        start = cuts[-1].start + size - overlap
        cuts.append(range(start, min(start + size, length)))
    return cuts


def token_range(spans: Int[np.ndarray, "T 2"], start: int, stop: int) -> tuple[int, int] | None:
    """Returns the indices of the first and last token that overlap a range of characters; None if
    no token does.

    `spans` has, for each token, the index of its first character and the index after its last
    character. `start` and `stop` describe the range of characters in the same way.
    """
    (tokens,) = np.nonzero((spans[:, 0] < stop) & (spans[:, 1] > start))
    return (int(tokens[0]), int(tokens[-1])) if len(tokens) else None


class QuestionDataset(Corpus[TextTokenizer, QuestionStore]):
    """Prepared questions that are opened for reading."""

    rows = "questions"


class QuestionPreparation(TextPreparation):
    """Prepares and opens the questions that the section Questions of a config describes."""

    dataset = QuestionDataset
    kind, endings, version = "Questions", squad.ENDINGS, VERSION

    def open_store(self, directory: Path, encoder: TextTokenizer) -> QuestionStore:
        return QuestionStore.open(directory, encoder)

    def texts(self) -> Iterator[list[str]]:
        """Yields each training context, once, and each training question."""
        seen: set[str] = set()
        for row in self.usable("train"):
            if row.context not in seen:
                seen.add(row.context)
                yield [row.context]
            yield [row.text]

    def content(self, row: Question) -> str:
        """Returns the context, so that all questions about a context are in one split."""
        return row.context

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Question | BadRow]:
        """Yields the questions. A question with the id of an earlier one becomes a BadRow."""
        seen: set[str] = set()
        no_answer = self.section.no_answer
        for row in generated.read(names, questions, lambda files: squad.read(files, no_answer)):
            if isinstance(row, Question) and row.id in seen:
                yield BadRow(row.name, "has the id of a question before it")
            else:
                yield row
            if isinstance(row, Question):
                seen.add(row.id)

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        section, tokenizer = self.section, self.tokenizer
        contexts: dict[str, Encoding] = {}  # each context once, in the order of the questions
        found = _located(self.read(split), contexts, tokenizer)
        located = [*tally.refuse_or_skip(found, section.errors)]
        asked = [question.text for question, _ in located]
        encoded = [e.ids for group in in_groups(asked) for e in tokenizer.encode(group)]
        questions = [ids[: section.max_question_length] for ids in encoded]
        cut = sum(len(ids) > section.max_question_length for ids in encoded)
        rows: list[WindowRow] = []
        for i, (question, answer) in enumerate(located):
            length = len(contexts[question.context].ids)
            rows += _rows(section, tokenizer, i, len(questions[i]), length, answer)
        table, places = np.array(rows, np.int32), {text: i for i, text in enumerate(contexts)}
        columns = {
            "contexts": Ragged.from_rows([encoding.ids for encoding in contexts.values()]),
            "spans": Ragged.from_rows([encoding.spans for encoding in contexts.values()]),
            "questions": Ragged.from_rows(questions),
            "context_of": np.array([places[question.context] for question, _ in located], np.int32),
            "rows": table,
            "ids": [question.id for question, _ in located],
            "asked": asked,
            "answers": [[answer.text for answer in question.answers] for question, _ in located],
            "texts": list(contexts),
        }
        stores.finish(directory, columns, {"rows": tally.report(), "cut": cut})
        without = sum(not question.answers for question, _ in located)
        line = f"{len(located):,} questions about {len(contexts):,} texts, {len(rows):,} windows"
        line += f" ({(table[:, 3] > 0).sum():,} with the answer)"
        line += f"; {without:,} without an answer" if without else ""
        return line + (f"; cut {cut:,} questions" if cut else "")


def _located(
    rows: Iterable[Question | BadRow], contexts: dict[str, Encoding], tokenizer: TextTokenizer
) -> Iterator[tuple[Question, tuple[int, int] | None] | BadRow]:
    """Yields each question with the token span of its first answer (None if it has no answer).

    A question whose answer contains no token becomes a BadRow. The encoding of each context is
    added to `contexts`.
    """
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        if row.context not in contexts:
            (contexts[row.context],) = tokenizer.encode([row.context])
        if not row.answers:
            yield row, None
            continue
        text, start = row.answers[0]
        answer = token_range(contexts[row.context].spans, start, start + len(text))
        if answer is None:
            yield BadRow(row.name, f"has the answer {text[: squad.SHOWN]!r} without any token")
        else:
            yield row, answer


def _rows(
    section: config.Questions,
    tokenizer: TextTokenizer,
    question: int,
    question_length: int,
    length: int,
    answer: tuple[int, int] | None,
) -> Iterator[WindowRow]:
    """Yields the windows of a question.

    `question` is the index of the question, and `question_length` its number of tokens. `length` is
    the number of tokens of the context. `answer` has the indices, in the context, of the answer's
    first and last token; None if there is no answer.
    """
    room = section.max_length - tokenizer.special_count(2) - question_length
    first = len(tokenizer.begin) + question_length + len(tokenizer.between)
    for window in windows(length, room, section.stride):
        target = (0, 0)
        if answer and answer[0] in window and answer[1] in window:
            target = (first + answer[0] - window.start, first + answer[1] - window.start)
        yield WindowRow(question, window.start, window.stop, *target)
