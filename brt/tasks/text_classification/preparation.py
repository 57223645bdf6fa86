"""Prepares labelled sentences, which the config section Sentences names.

The sentences are read from tables or generated, tokenized, and written to a directory of the cache,
which has a store (`SentenceStore`) for each split. The columns of a table are named in the config,
or have common names such as "sentence" and "label".
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from brt import config
from brt.config.checks import column
from brt.data import generated, stores, tables
from brt.data.preparation import Corpus, TextPreparation, in_groups
from brt.data.quarantine import BadRow, Tally
from brt.data.stores import Ragged, RowStore
from brt.data.tables import Row
from brt.data.text_tokenizers import TextTokenizer
from brt.errors import ConfigError, DataError

ENDINGS = (*tables.FORMATS, ".tsv")
# These are the columns of sentences and of pairs of sentences in GLUE and other common datasets, in
# order of preference.
SENTENCES = (
    ("sentence1", "sentence2"),  # RTE, WNLI and STS-B have these columns.
    ("premise", "hypothesis"),  # MNLI has these columns.
    ("question", "sentence"),  # QNLI has these columns.
    ("question1", "question2"),  # QQP has these columns.
    ("#1 String", "#2 String"),  # MRPC has these columns.
    ("sentence",),  # CoLA and SST-2 have this column.
    ("text",),
)
LABELS = ("label", "gold_label", "is_duplicate", "Quality", "score")
IDS = ("id", "idx", "index")
# The hash of a generated source depends on this number. The number must be increased if the
# generated text changes, so that data in the cache are prepared again.
VERSION = 1
FILLERS, GENERATED_LABELS, WORDS = 60, ("animal", "plant", "stone"), 6


class Example(NamedTuple):
    """One sentence or a pair of sentences, with a label or a number."""

    name: str  # file and row, for messages
    id: str  # identifies the row in files of predictions
    texts: tuple[str, ...]  # one or two sentences
    label: str | float


class Columns(NamedTuple):
    """Names of the columns that are read from a table."""

    texts: tuple[str, ...]  # the one or two columns that contain a sentence each
    label: str  # column of the label or number
    id: str  # "" if the table has no ids


def read_examples(
    names: Sequence[str], section: config.Sentences, numbers: bool = False
) -> Iterator[Example | BadRow]:
    """Yields the rows of all sources in order, and a BadRow for each row that cannot be used.

    If a row has no id, the row's number becomes its id. Numbers continue from source to source. If
    `numbers` is True, labels are real numbers instead of classes.
    """
    sources = (table for name in names for table in tables.tables(name, ENDINGS, section.header))
    label = _number if numbers else _class
    return tables.read(
        sources,
        lambda table, header: choose_columns(table, header, section),
        lambda row, columns, count: _example(row, columns, count, label),
    )


def choose_columns(table: str, header: Collection[str], section: config.Sentences) -> Columns:
    """Returns the columns that are read from a table.

    A column that `section` does not name is found by its usual names. Raises DataError if the table
    has no column of sentences or of labels.
    """
    roles = ("first", "second", "label", "id")
    exist = tables.check_columns(table, header, {role: column(section, role) for role in roles})
    configured = tuple(filter(None, (column(section, "first"), column(section, "second"))))
    common = (names for names in SENTENCES if all(name in header for name in names))
    texts = configured or next(common, ())
    label = column(section, "label") or next((name for name in LABELS if name in header), "")
    if not texts or not label:
        what, role = ("label", "label") if texts else ("sentence", "first")
        raise DataError(
            f"{table} has no {what} under a usual name; {exist}: name one with Data.columns = "
            f"('{role}=COLUMN',)"
        )
    id = column(section, "id") or next((name for name in IDS if name in header), "")
    return Columns(texts, label, id)


def _example(
    row: Row, columns: Columns, count: int, read_label: Callable[[Any, str], str | float]
) -> Example | BadRow:
    try:
        texts = tuple(_text(row.values, name) for name in columns.texts)
        label = read_label(row.values.get(columns.label), columns.label)
        id = tables.row_id(row.values.get(columns.id), count)
    except ValueError as error:
        return BadRow(row.name, str(error))
    return Example(row.name, id, texts, label)


def _text(values: Mapping[str, Any], column: str) -> str:
    text = tables.text_of(values, column)
    if not text.strip():
        raise ValueError(f"has {'no text' if text else 'nothing'} in '{column}'")
    return text


def _class(value: Any, column: str) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float):
        raise ValueError(
            f"has the number {value} for a label (Training.task = 'text_regression' learns "
            f"numbers) in '{column}'"
        )
    if value is None or value == "":
        raise ValueError(f"has no label in '{column}'")
    return str(value) if isinstance(value, int) else tables.text_value(value, column)


def _number(value: Any, column: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"has {value!r}, which is no number, in '{column}'")
    return number


def examples(source: str) -> Iterator[Example]:
    """Yields the texts of a source `generated:NAME/COUNT`; NAME determines all of them.

    They are for tests and examples, and the same on every machine. A text consists of 30 to 60
    words from a fixed lexicon of 60 words and, at a random position, one keyword. There are three
    labels with six keywords each, and the keyword alone determines the label. The classifier reads
    the encoder's output at the first token, so attention has to find the keyword.
    """
    name, count = generated.parse(source)
    lexicon = generated.words(f"sentences {VERSION}", FILLERS + len(GENERATED_LABELS) * WORDS)
    for number in range(count):
        draw = generated.draw(f"sentences {VERSION} {name}/{number}")
        text = [lexicon[i] for i in draw.randint(FILLERS, size=draw.randint(30, 61))]
        label = draw.randint(len(GENERATED_LABELS))
        word = lexicon[FILLERS + label * WORDS + draw.randint(WORDS)]
        text.insert(draw.randint(len(text) + 1), word)
        id = f"{name}-{number:05}"
        yield Example(id, id, (" ".join(text),), GENERATED_LABELS[label])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SentenceStore(RowStore):
    """Sentences (or pairs of sentences) of a split as token ids, each with a label or a number."""

    tokens: Ragged  # token ids of each row, int32 [T]
    # int32 indices into `labels`, or float32 numbers
    targets: Int[np.ndarray, " rows"] | Float[np.ndarray, " rows"]
    labels: tuple[str, ...]  # names of all labels; empty for numbers

    @classmethod
    def open(cls, directory: Path) -> "SentenceStore":
        with stores.opened(directory, facts={"rows": {"bad": int}}) as opened:
            columns = {name: opened.columns[name] for name in ("targets", "ids", "labels")}
            tokens = opened.ragged("tokens")
            if columns["labels"]:
                stores.check_indices("targets", columns["targets"], len(columns["labels"]))
            if {*map(len, (columns["targets"], columns["ids"]))} != {len(tokens)}:
                raise ValueError("its columns have different lengths")
        return cls(directory=directory, manifest=opened.manifest, tokens=tokens, **columns)

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        return self.tokens.lengths

    def read(self, row: int | np.integer) -> Int[np.ndarray, " T"]:
        return self.tokens[row]

    @property
    def row_targets(self) -> Int[np.ndarray, "rows 1"] | Float[np.ndarray, "rows 1"]:
        """Target that the model has to predict for each row: the index of a label, or a number."""
        return self.targets[:, None]

    def with_labels(self, labels: Sequence[str]) -> "SentenceStore":
        """Returns the store with the labels in another order, and possibly with additional labels.

        The targets of the result are indices into `labels`. When a model is evaluated, the order of
        `labels` must be the order of the model's outputs. Raises ConfigError if `labels` lacks a
        label of the store.
        """
        if tuple(labels) == self.labels:
            return self
        if missing := [label for label in self.labels if label not in labels]:
            raise ConfigError(
                f"Sentences.labels = {tuple(labels)} lacks {missing[0]!r}, which Data.train "
                f"has; set it to {self.labels} in the order you want, or remove it"
            )
        indices = np.array([labels.index(label) for label in self.labels], np.int32)
        manifest = {**self.manifest, "fingerprint": f"{self.fingerprint} {'|'.join(labels)}"}
        return dataclasses.replace(
            self, targets=indices[self.targets], labels=tuple(labels), manifest=manifest
        )


class SentenceDataset(Corpus[TextTokenizer, SentenceStore]):
    """Prepared sentences that are opened for reading.

    The index of a label is the same in all splits.
    """

    rows = "sentences"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, in the order of their indices; empty if the labels are numbers."""
        return self.split("train").labels


class SentencePreparation(TextPreparation):
    """Prepares and opens the sentences that a config section describes."""

    dataset, store, kind = SentenceDataset, SentenceStore, "Sentences"
    endings, version = ENDINGS, VERSION
    numbers: ClassVar[bool] = False  # True if the labels are real numbers instead of classes
    # The training rows, which are written first, determine the labels of all splits.
    _labels: tuple[str, ...] = ()

    def open_split(self, split: str, encoder: Any, known: Path | None = None) -> SentenceDataset:
        self._labels = sort_labels(set(self.section.labels))
        return super().open_split(split, encoder, known)

    def values_from_train(self) -> dict[str, Any]:
        """Returns the names of the labels, whose order determines the indices in every split."""
        return {"labels": self.section.labels}

    def open_store(self, directory: Path, encoder: TextTokenizer) -> SentenceStore:
        opened, labels = super().open_store(directory, encoder), self.section.labels
        return opened.with_labels(labels) if labels else opened

    def texts(self) -> Iterator[list[str]]:
        for row in self.usable("train"):
            yield from ([text] for text in row.texts)

    def content(self, row: Example) -> str:
        """Returns the sentences, so that rows with equal sentences are in one split."""
        return "\n".join(row.texts)

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Example | BadRow]:
        if self.numbers and any(name.startswith(generated.PREFIX) for name in names):
            raise DataError(
                f"Data.{split} = {names} is generated with classes for labels, but "
                "Training.task = 'text_regression' reads numbers; name your own files"
            )
        return generated.read(
            names, examples,
            lambda files: read_examples(files, self.section, self.numbers),
        )  # fmt: skip

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        section, tokenizer, limit = self.section, self.tokenizer, self.section.max_length
        tokens, labels, ids, cut = [], [], [], 0
        rows = tally.refuse_or_skip(_known(self.read(split), self._labels), section.errors)
        for group in in_groups(rows):
            encodings = iter(tokenizer.encode([text for row in group for text in row.texts]))
            for row in group:
                parts = [next(encodings).ids for _ in row.texts]
                shortened = truncate_texts(parts, limit - tokenizer.special_count(len(parts)))
                cut += sum(map(len, shortened)) < sum(map(len, parts))
                tokens.append(tokenizer.wrap(*shortened))
                labels.append(row.label)
                ids.append(row.id)
        if self.numbers:
            targets = np.array(labels, np.float32)
            counts = f"{min(labels):g} to {max(labels):g}"
        else:
            known = self._labels = self._labels or sort_labels(set(labels))
            targets = np.array([known.index(label) for label in labels], np.int32)
            counts = ", ".join(f"{labels.count(label):,} {label}" for label in known)
        if len(self._labels) == 1:
            raise DataError(
                f"Data.{split} = {getattr(section, split)} has one label only, "
                f"{self._labels[0]!r}; name sources with two at least"
            )
        columns = {
            "tokens": Ragged.from_rows(tokens),
            "targets": targets,
            "ids": ids,
            "labels": self._labels,
        }
        stores.finish(directory, columns, {"rows": tally.report(), "cut": cut})
        text = f"{len(ids):,} sentences ({counts}), {sum(map(len, tokens)):,} tokens"
        return text + (f"; cut {cut:,} to {limit} tokens" if cut else "")


class NumberPreparation(SentencePreparation):
    """Prepares and opens sentences whose labels are real numbers instead of classes."""

    kind, numbers = "Sentences with numbers", True


def _known(rows: Iterable[Example | BadRow], labels: tuple[str, ...]) -> Iterator[Example | BadRow]:
    """Yields rows; a row whose label is not in `labels` becomes a BadRow.

    If `labels` is empty, all labels are accepted.
    """
    for row in rows:
        if labels and isinstance(row, Example) and row.label not in labels:
            existing = ", ".join(labels)
            yield BadRow(row.name, f"has the label {row.label!r}, Data.train only {existing}")
        else:
            yield row


def truncate_texts(texts: list[np.ndarray], limit: int) -> list[np.ndarray]:
    """Cuts the ends of one or two texts, so that they have at most `limit` token ids in total.

    Of two texts, the longer one is cut first.
    """
    if len(texts) == 1:
        return [texts[0][:limit]]
    first, second = map(len, texts)
    excess = max(first + second - limit, 0)
    # Together, the texts lose `excess` ids. The first text loses `difference` ids more than the
    # second, and one more than that if `excess + difference` is odd. Thus the longer text is cut
    # until both are equally long, and then both are cut alike.
    difference = min(max(first - second, -excess), excess)
    return [
        texts[0][: first - (excess + difference + 1) // 2],
        texts[1][: second - (excess - difference) // 2],
    ]


def sort_labels(labels: set[str]) -> tuple[str, ...]:
    """Returns labels in alphabetical order, or in numerical order if all are integers."""
    if all(label.removeprefix("-").isdecimal() for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))
