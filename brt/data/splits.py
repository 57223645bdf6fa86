"""Which documents are for training, which are held out."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from brt import config
from brt.data import documents
from brt.data.documents import Document
from brt.errors import ConfigError

SPLITS = ("train", "validation", "test")


class Plan:
    """The splits of `data`. Those that name no source get a part of the train documents.

    Attributes:
      splits: those that have documents.
    """

    def __init__(self, data: config.Data):
        self._data = data
        fractions = {split: getattr(data, f"{split}_fraction") for split in SPLITS[1:]}
        self._fractions = {
            split: fraction
            for split, fraction in fractions.items()
            if fraction > 0 and not getattr(data, split)
        }
        self.splits = tuple(s for s in SPLITS if getattr(data, s) or s in self._fractions)
        self._assigned: list[str] = []  # of each document of Data.train, where it is shared
        if self._fractions:
            self._assigned = assign([d.name for d in self._read("train")], self._fractions)

    def documents(self, split: str) -> Iterator[Document]:
        """The documents of a split, in reading order."""
        if not self._assigned or (split != "train" and split not in self._fractions):
            return self._read(split)
        shared = zip(self._read("train"), self._assigned, strict=True)
        return (document for document, own in shared if own == split)

    def _read(self, split: str) -> Iterator[Document]:
        return documents.read(
            getattr(self._data, split), text_field=self._data.text_field, errors=self._data.errors
        )


def assign(names: Sequence[str], fractions: Mapping[str, float]) -> list[str]:
    """A split for each document: "train", or one of `fractions` (at least one document each).

    The hash of the file's name decides, not its directory: the same on every machine.

    Raises:
      ConfigError: there are too few documents.
    """
    if len(names) <= len(fractions):
        raise ConfigError(
            f"{len(names)} document(s) cannot be shared by train and {' and '.join(fractions)}; "
            f"name files with {' and '.join(f'Data.{split}' for split in fractions)}, or set "
            f"{' and '.join(f'Data.{split}_fraction' for split in fractions)} to 0"
        )
    splits = ["train"] * len(names)
    order = sorted(range(len(names)), key=lambda i: (_hash(names[i]), names[i]))
    free = len(names) - len(fractions) - 1  # beyond one for each split
    for split, fraction in fractions.items():
        more = min(max(round(fraction * len(names)) - 1, 0), free)
        free -= more
        for _ in range(1 + more):
            splits[order.pop()] = split
    return splits


def _hash(name: str) -> str:
    return hashlib.sha256(Path(name).name.encode()).hexdigest()
