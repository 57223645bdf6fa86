"""Prepares labelled sentences, which the config section Sentences names.

The sentences are read from files, tokenized, and written to a directory of the cache, which has a
store (`SentenceStore`) for each split.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from brt import config
from brt.data import generated as made_up
from brt.data.rows import ragged, store
from brt.data.rows.preparation import RowCorpus
from brt.data.rows.tally import BadRow, Tally
from brt.data.texts.preparation import TextPreparation
from brt.data.texts.tokenization import TextTokenizer
from brt.errors import DataError
from brt.tasks.text_classification.data import examples, generated
from brt.tasks.text_classification.data.examples import Example
from brt.tasks.text_classification.data.store import SentenceStore

TOGETHER = 512  # This number of rows is tokenized in parallel.


class SentenceDataset(RowCorpus[TextTokenizer, SentenceStore]):
    """Prepared sentences that are opened for reading.

    The index of a label is the same in all splits.
    """

    rows = "sentences"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, in the order of their indices; empty if the labels are numbers."""
        return self.split("train").labels


def prepare(
    section: config.Sentences, progress: bool = True, *, numbers: bool = False
) -> SentenceDataset:
    return Preparation(section, progress, numbers).open()


class Preparation(TextPreparation):
    """Prepares and opens the sentences that a config section describes.

    If `numbers` is True, labels are real numbers instead of classes.
    """

    dataset = SentenceDataset
    endings, version = examples.ENDINGS, generated.VERSION

    def __init__(self, section: config.Sentences, progress: bool = True, numbers: bool = False):
        super().__init__(section, progress)
        self._numbers = numbers
        self.kind = "Sentences with numbers" if numbers else "Sentences"
        # The training rows, which are written first, determine the labels of all splits.
        self._labels: tuple[str, ...] = ()

    def open_split(self, split: str, encoder: Any, known: Path | None = None) -> SentenceDataset:
        self._labels = sort_labels(set(self.section.labels))
        return super().open_split(split, encoder, known)

    def values_from_train(self) -> dict[str, Any]:
        """Returns the names of the labels, whose order determines the indices in every split."""
        return {"labels": self.section.labels}

    def open_store(self, directory: Path, encoder: TextTokenizer) -> SentenceStore:
        opened, labels = SentenceStore.open(directory), self.section.labels
        return opened.with_labels(labels) if labels else opened

    def texts(self) -> Iterator[str]:
        for row in self.training_rows():
            yield from row.texts

    def content(self, row: Example) -> str:
        """Returns the sentences, so that rows with equal sentences are in one split."""
        return "\n".join(row.texts)

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Example | BadRow]:
        if self._numbers and any(name.startswith(made_up.PREFIX) for name in names):
            raise DataError(
                f"Data.{split} = {names} is generated with classes for labels, but "
                "Training.task = 'text_regression' reads numbers; name your own files"
            )
        return made_up.read(
            names, generated.examples,
            lambda files: examples.read(files, self.section, self._numbers),
        )  # fmt: skip

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        section, tokenizer, limit = self.section, self.tokenizer, self.section.max_length
        tokens, labels, ids, cut = [], [], [], 0
        rows = tally.refuse_or_skip(_known(self.read(split), self._labels), section.errors)
        for group in iter(lambda: list(itertools.islice(rows, TOGETHER)), []):
            for row, parts in zip(group, _encoded(group, tokenizer), strict=True):
                shortened = truncate_texts(parts, limit - tokenizer.special_count(len(parts)))
                cut += sum(map(len, shortened)) < sum(map(len, parts))
                tokens.append(tokenizer.wrap(*shortened))
                labels.append(row.label)
                ids.append(row.id)
        if self._numbers:
            targets, counts = _number_targets(labels)
        else:
            self._labels = self._labels or sort_labels(set(labels))
            targets, counts = _label_targets(labels, self._labels)
        if len(self._labels) == 1:
            raise DataError(
                f"Data.{split} = {getattr(section, split)} has one label only, "
                f"{self._labels[0]!r}; name sources with two at least"
            )
        texts = {"ids": ids, "labels": self._labels}
        facts = {"texts": list(texts), "rows": tally.report(), "cut": cut}
        content = ragged.from_rows(tokens, np.dtype(np.int32)).columns("tokens")
        store.finish(directory, {**content, "targets": targets, **texts}, facts)
        text = f"{len(ids):,} sentences ({counts}), {sum(map(len, tokens)):,} tokens"
        return text + (f"; cut {cut:,} to {limit} tokens" if cut else "")


def _label_targets(
    labels: list[str], known: tuple[str, ...]
) -> tuple[Int[np.ndarray, " rows"], str]:
    counts = ", ".join(f"{labels.count(label):,} {label}" for label in known)
    return np.array([known.index(label) for label in labels], np.int32), counts


def _number_targets(labels: list[float]) -> tuple[Float[np.ndarray, " rows"], str]:
    return np.array(labels, np.float32), f"{min(labels):g} to {max(labels):g}"


def _known(rows: Iterable[Example | BadRow], labels: tuple[str, ...]) -> Iterator[Example | BadRow]:
    """Yields rows, and a BadRow in place of a row whose label does not occur in training."""
    for row in rows:
        if labels and isinstance(row, Example) and row.label not in labels:
            existing = ", ".join(labels)
            yield BadRow(row.name, f"has the label {row.label!r}, Data.train only {existing}")
        else:
            yield row


def _encoded(rows: list[Example], tokenizer: TextTokenizer) -> Iterator[list[np.ndarray]]:
    encodings = iter(tokenizer.encode([text for row in rows for text in row.texts]))
    for row in rows:
        yield [next(encodings).ids for _ in row.texts]


def truncate_texts(texts: list[np.ndarray], limit: int) -> list[np.ndarray]:
    """Cuts the ends of one or two texts, so that they have at most `limit` token ids in total.

    Of two texts, the longer one is cut first.
    """
    if len(texts) == 1:
        return [texts[0][:limit]]
    first, second = map(len, texts)
    excess = max(first + second - limit, 0)
    # The texts lose `excess` ids together, and the first text loses `difference` ids more than the
    # second text, or one more than that if the sum of both numbers is odd. The longer text is thus
    # cut until both are equally long; then both are cut alike.
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
