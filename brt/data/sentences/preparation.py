"""From `config.Sentences` to stores of sentences: once per content, in the cache."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from brt import config
from brt.data import preparation as corpora
from brt.data.pairs.columns import BadRow
from brt.data.pairs.sources import Tally
from brt.data.sentences import examples, generated
from brt.data.sentences.examples import Example
from brt.data.sentences.store import SentenceStore
from brt.data.splits import split_named
from brt.data.texts import arrays, preparation
from brt.data.texts import generated as made_up
from brt.data.texts.tokenization import TextTokenizer
from brt.errors import DataError

SKIP = "Sentences.errors = 'skip'"
TOGETHER = 512  # rows that are tokenized in parallel


class SentenceCorpus(NamedTuple):
    """Prepared sentences, opened; all splits number the labels alike."""

    directory: Path
    tokenizer: TextTokenizer
    splits: dict[str, SentenceStore]

    def split(self, name: str) -> SentenceStore:
        """The store of a split; raises DataError where there is none."""
        return split_named(self.splits, name, "sentences", "Sentences")

    @property
    def labels(self) -> tuple[str, ...]:
        return self.split("train").labels


def prepare(
    section: config.Sentences, progress: bool = True, *, numbers: bool = False
) -> SentenceCorpus:
    """Opens the sentences that a section describes; prepares them first where that is new.

    Args:
      progress: say on stderr what is done, and what was left out.
      numbers: labels are real numbers, not classes.

    Raises:
      DataError: a source cannot be read as asked.
      ConfigError: Sentences.labels lacks one.
    """
    directory = preparation.prepare(section, NUMBERS if numbers else CLASSES, progress)
    names = corpora.read_manifest(directory)["splits"]
    splits = {name: SentenceStore.open(directory / name) for name in names}
    if section.labels:
        splits = {name: store.ordered(section.labels) for name, store in splits.items()}
    return SentenceCorpus(directory, preparation.open_tokenizer(directory), splits)


def read(
    section: config.Sentences, split: str, numbers: bool = False
) -> Iterator[Example | BadRow]:
    """The rows of a split."""
    for made, names in itertools.groupby(
        getattr(section, split), lambda name: name.startswith(made_up.PREFIX)
    ):
        if made and numbers:
            raise DataError(
                f"Sentences.{split} = {getattr(section, split)} is made up with classes for "
                "labels, but Training.objective = 'regression' reads numbers; name your own files"
            )
        if made:
            yield from itertools.chain.from_iterable(map(generated.examples, names))
        else:
            yield from examples.read(list(names), section, numbers)


def _texts(section: config.Sentences, numbers: bool = False) -> Iterator[str]:
    for row in Tally("train", SKIP).usable(read(section, "train", numbers)):
        yield from row.texts


def _write(
    section: config.Sentences,
    split: str,
    tokenizer: TextTokenizer,
    directory: Path,
    numbers: bool = False,
) -> tuple[str, Tally]:
    """Train comes first, whose labels the others share."""
    first = split == "train" or numbers
    known = () if first else SentenceStore.open(directory / "train").labels
    tally, limit = Tally(split, SKIP), section.max_length
    tokens, labels, ids, cut = [], [], [], 0
    usable = tally.usable(_known(read(section, split, numbers), known))
    for group in iter(lambda: list(itertools.islice(usable, TOGETHER)), []):
        for row, parts in zip(group, _encoded(group, tokenizer), strict=True):
            kept = shortened(parts, limit - tokenizer.around(len(parts)))
            cut += sum(map(len, kept)) < sum(map(len, parts))
            tokens.append(tokenizer.wrap(*kept))
            labels.append(row.label)
            ids.append(row.id)
    preparation.settle(tally, section, split)
    targets, known, counts = _numbered(labels) if numbers else _placed(labels, known)
    if not numbers and len(known) < 2:
        raise DataError(
            f"Sentences.{split} = {getattr(section, split)} has one label only, {known[0]!r}; name "
            "sources with two at least"
        )
    content = {**arrays.flat("tokens", tokens, np.dtype(np.int32)), "targets": targets}
    facts = {"rows": tally.report(), "cut": cut}
    arrays.write(directory / split, content, {"ids": ids, "labels": known}, facts)
    text = f"{len(ids):,} sentences ({counts}), {sum(map(len, tokens)):,} tokens"
    return text + (f"; cut {cut:,} to {limit} tokens" if cut else ""), tally


def _placed(
    labels: list[str], known: tuple[str, ...]
) -> tuple[Int[np.ndarray, " rows"], tuple[str, ...], str]:
    """Places of labels, the labels, and a word on how many there are of each."""
    known = known or ordered(set(labels))
    counts = ", ".join(f"{labels.count(label):,} {label}" for label in known)
    return np.array([known.index(label) for label in labels], np.int32), known, counts


def _numbered(labels: list[float]) -> tuple[Float[np.ndarray, " rows"], tuple[()], str]:
    """Numbers, no labels, and a word on what numbers."""
    return np.array(labels, np.float32), (), f"{min(labels):g} to {max(labels):g}"


def _known(rows: Iterable[Example | BadRow], labels: tuple[str, ...]) -> Iterator[Example | BadRow]:
    """Rows whose label train has, too."""
    for row in rows:
        if labels and isinstance(row, Example) and row.label not in labels:
            there = ", ".join(labels)
            yield BadRow(row.name, f"has the label {row.label!r}, Sentences.train only {there}")
        else:
            yield row


def _encoded(rows: list[Example], tokenizer: TextTokenizer) -> Iterator[list[np.ndarray]]:
    found = iter(tokenizer.encode([text for row in rows for text in row.texts]))
    for row in rows:
        yield [next(found).ids for _ in row.texts]


def shortened(parts: list[np.ndarray], limit: int) -> list[np.ndarray]:
    """The beginnings of one text or two, at most `limit` ids in all; the longer is cut first."""
    if len(parts) == 1:
        return [parts[0][:limit]]
    first, second = map(len, parts)
    over = max(first + second - limit, 0)
    own = min(max(first - second, -over), over)  # by how much more the first is cut
    return [parts[0][: first - (over + own + 1) // 2], parts[1][: second - (over - own) // 2]]


def ordered(labels: set[str]) -> tuple[str, ...]:
    """Numbers by their size, other names by their letters."""
    if all(label.removeprefix("-").isdecimal() for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


CLASSES = preparation.Kind(
    "Sentences", "Sentences", examples.ENDINGS, generated.VERSION, _texts, _write
)
NUMBERS = CLASSES._replace(
    name="Sentences with numbers", texts=functools.partial(_texts, numbers=True),
    write=functools.partial(_write, numbers=True),
)  # fmt: skip
