"""Prepares stores of rows from a section of the config; see `brt.data.cache`.

The result is a directory in the cache:

    train/ validation/ test/   stores (a split without sources is absent)
    tokenizer.* or another     the tokenizer, or what else encodes rows
    corpus.json                sources and settings; written last
"""

import abc
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from brt.config.checks import share_of
from brt.data import cache, sources, tokenizer_training
from brt.data.rows.store import RowStore
from brt.data.rows.tally import BadRow, Tally
from brt.data.sources import FileHash
from brt.data.splits import SPLITS, Shares
from brt.data.tokenizer_training import Special
from brt.errors import DataError

Encoder = TypeVar("Encoder")
Store = TypeVar("Store")


@dataclasses.dataclass(frozen=True, eq=False)
class RowCorpus(Generic[Encoder, Store]):
    """The opened stores of a prepared directory, by split, with the object that encodes rows.

    Attributes:
      rows: what a row is called, in the plural.
    """

    rows: ClassVar[str] = "rows"

    directory: Path
    tokenizer: Encoder
    splits: dict[str, Store]

    def split(self, name: str) -> Store:
        """Returns the store of the split with this name; raises DataError if there is none."""
        if name not in self.splits:
            raise DataError(
                f"there are no {name} {self.rows}, only {', '.join(self.splits)}; name some with "
                f"Data.{name}"
            )
        return self.splits[name]

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns a JSON description of each split; see `brt.data.cache.described`."""
        return cache.described(self.directory, self.splits, self.rows)


class Preparation(abc.ABC):
    """Base class that prepares and opens the rows of a section; each kind of rows has a subclass.

    Attributes:
      dataset: the subclass of RowCorpus that `open` returns.
      kind: the name of the kind of rows, part of the key in the cache.
      encoding: the kind of object that encodes rows, such as "tokenizer" or "vocabulary".
      tokenizer: the object that encodes rows, once it exists.
      shares: for each split that is a part of train, its share of train's rows.
      endings: suffixes of the files to read from directories.
    """

    dataset: type[RowCorpus]
    kind: str
    encoding = "tokenizer"
    tokenizer: Any = None
    endings: tuple[str, ...] = ()

    def __init__(self, section: Any, progress: bool = True):
        self.section, self.progress = section, progress
        shares = {split: share_of(section, split) for split in SPLITS[1:]}
        self.shares = {split: share for split, share in shares.items() if share}

    def open(self) -> Any:
        """Returns the opened data, a `dataset`; prepares them first if necessary.

        Raises:
          DataError: a source cannot be read, or is part of two splits.
        """
        hashes = {
            split: [] if split in self.shares else self.hashes(getattr(self.section, split))
            for split in SPLITS
        }
        self.check_sources(hashes)
        more = {"kind": self.kind, **self.decisive()}
        directory = cache.prepared(self.section, hashes, self._build, **more)
        manifest = cache.read_manifest(directory)
        file = manifest.get(self.encoding, {}).get("file", f"{self.encoding}.json")
        encoder = self.load(str(directory / file))
        return self._opened(directory, encoder, manifest["splits"])

    def open_split(self, split: str, encoder: Any, known: Path | None = None) -> Any:
        """Returns a single opened split, encoded by a given encoder; see `cache.prepared_split`.

        Args:
          split: the name of the split.
          encoder: the object that encodes rows, such as the tokenizer of a trained model.
          known: a directory from which a run read this split before.

        Raises:
          DataError: there is no such split, or its sources cannot be read.
        """
        if not getattr(self.section, split):
            raise DataError(
                f"there are no {split} {self.dataset.rows}; name some with Data.{split}"
            )
        self.tokenizer = encoder
        directory = cache.prepared_split(
            self.section, split, split in self.shares, known, self.hashes,
            lambda place, facts: self._write((split,), place), kind=self.kind,
            encoder=encoder.fingerprint, **self.of_train(),
        )  # fmt: skip
        return self._opened(directory, encoder, (split,))

    def _opened(self, directory: Path, encoder: Any, splits: Iterable[str]) -> Any:
        stores = {name: self.open_store(directory / name, encoder) for name in splits}
        for name, store in stores.items():
            if store.written_with not in ("", encoder.fingerprint):
                raise DataError(
                    f"{directory / name} was written with another {self.encoding} than "
                    f"{encoder.name}; delete {directory} and prepare it again"
                )
        return self.dataset(directory, encoder, stores)

    def read(self, split: str) -> Iterator[Any]:
        """Yields the rows of a split; rows of train that belong to other splits are left out of
        train.
        """
        if not self.shares or split not in ("train", *self.shares):
            return self.rows(split, getattr(self.section, split))
        return (row for row in self._train() if self._split_of(row) == split)

    def _train(self) -> Iterator[Any]:
        return self.rows("train", self.section.train)

    def _split_of(self, row: Any) -> str:
        return "train" if isinstance(row, BadRow) else self._shared(self.content(row))

    @functools.cached_property
    def _shared(self) -> Shares:
        contents = (self.content(row) for row in self._train() if not isinstance(row, BadRow))
        return Shares(contents, self.shares, "Data.train")

    @abc.abstractmethod
    def rows(self, split: str, names: Sequence[str]) -> Iterator[Any]:
        """Yields all rows of some sources, and a BadRow for each row that cannot be used.

        Args:
          split: the name of the split, for error messages.
          names: the sources.
        """

    @abc.abstractmethod
    def content(self, row: Any) -> str:
        """Returns the content of a row as a text; rows with the same content belong to the same
        split.
        """

    def of_train(self) -> dict[str, Any]:
        """Returns JSON of values that train determines in other splits, besides the encoder.

        The values are part of the key under which a single split is cached.
        """
        return {}

    @abc.abstractmethod
    def load(self, name: str) -> Any:
        """Returns the object that encodes rows, which has a `fingerprint`.

        Args:
          name: the path of a file with the object, or the value of the setting that names it.

        Raises:
          DataError: the file is missing or damaged.
          ConfigError: the setting is not valid.
        """

    @abc.abstractmethod
    def open_store(self, directory: Path, encoder: Any) -> RowStore:
        """Returns the opened store of a split.

        Args:
          directory: the directory of the store.
          encoder: the object that encoded its rows.
        """

    @abc.abstractmethod
    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Returns the hashes of the files that belong to the sources with these names."""

    def left_out(self, name: str) -> str:
        """Returns a sentence about the files of a source that are not read, or "" if all
        are read.
        """
        return sources.left_out(name, self.endings)

    def check_sources(self, hashes: cache.Hashes) -> None:
        """Raises DataError if two splits have a file in common."""
        cache.refuse_shared(hashes)

    def decisive(self) -> dict[str, Any]:
        """Returns JSON of values that determine the data, besides settings and sources.

        The values are part of the key in the cache.
        """
        return {}

    def begin(self, directory: Path) -> dict[str, Any]:
        """Creates the object that encodes rows and saves it in `directory`; no row is written yet.

        Returns:
          Entries of the manifest that describe the object. The default creates nothing and returns
          no entries.
        """
        return {}

    @abc.abstractmethod
    def write(self, split: str, directory: Path, tally: Tally) -> str:
        """Writes the store of a split, and returns a line that tells the user what was written.

        Args:
          split: the name of the split; train is written first.
          directory: the directory of the store.
          tally: counts the rows, and removes those that cannot be used.
        """

    def _build(self, directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
        cache.say_left_out(self.section, SPLITS, self.left_out, self.progress)
        described = self.begin(directory)
        splits = [split for split in SPLITS if getattr(self.section, split)]
        return {**self._write(splits, directory), **described}

    def _write(self, splits: Sequence[str], directory: Path) -> dict[str, Any]:
        """Writes the stores of some splits, and returns their entries of the manifest."""
        held_out = {
            split: f"{share:.0%} of the rows of Data.train"
            for split, share in self.shares.items()
            if split in splits
        }
        for split in splits:
            place = directory / split
            place.mkdir()
            with cache.bar(split, self.progress, unit=" rows") as bar:
                tally = Tally(split, "Data.errors = 'skip'", bar.update)
                line = self.write(split, place, tally)
            if tally.bad:
                cache.say(tally.described(), self.progress)
            origin = f" ({held_out[split]})" if split in held_out else ""
            cache.say(f"prepared {split}{origin}: {line}", self.progress)
        return {"splits": list(splits), "held_out": held_out}


class TokenizedPreparation(Preparation):
    """Preparation for sections that name a tokenizer or train one on the training data.

    Attributes:
      special: ids of the special pieces of a tokenizer that is trained.
    """

    special: Special

    @abc.abstractmethod
    def texts(self) -> Iterable[str]:
        """Returns the texts of the training data."""

    @property
    def _size(self) -> int | None:
        return tokenizer_training.vocabulary_size(self.section.tokenizer, "Data.tokenizer")

    def decisive(self) -> dict[str, Any]:
        """Returns {"tokenizer": FINGERPRINT} if the section names a tokenizer, otherwise {}.

        The result is part of the key in the cache.
        """
        return {} if self._size else {"tokenizer": self.load(self.section.tokenizer).fingerprint}

    def begin(self, directory: Path) -> dict[str, Any]:
        """Trains or loads the tokenizer, and saves it in `directory`.

        Returns:
          The entry of the manifest that describes the tokenizer.
        """
        if size := self._size:
            cache.say(f"training a tokenizer of {size} pieces", self.progress)
            path = directory / "tokenizer.model"
            tokenizer_training.train_sentencepiece(
                ([text] for text in self.texts()), size, path, seed=cache.SEED,
                special=self.special, setting="Data.tokenizer",
            )  # fmt: skip
            self.tokenizer = self.load(str(path))
        else:
            self.tokenizer = self.load(self.section.tokenizer)
            (directory / self.tokenizer.file[0]).write_bytes(self.tokenizer.file[1])
        name, fingerprint = self.section.tokenizer, self.tokenizer.fingerprint
        file = self.tokenizer.file[0]
        return {"tokenizer": {"file": file, "name": name, "fingerprint": fingerprint}}
