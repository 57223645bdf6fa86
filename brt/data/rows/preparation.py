"""Prepares stores of rows, such as pairs of texts, from the data that a config section names.

Rows are read from files, encoded as ids, and stored in a directory of the cache (see
`brt.data.cache`):

    train/ validation/ test/         stores (a split without sources is absent)
    tokenizer.* or vocabulary.json   the object that encodes rows
    corpus.json                      the manifest: sources and settings; written last
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
    """Prepared rows that are opened for reading.

    Attributes:
      rows: the plural noun for rows in messages, such as "pairs".
      directory: the directory of the prepared data.
      tokenizer: the object that encoded the rows, such as a tokenizer or a vocabulary.
      splits: the store of each split, by the name of the split.
    """

    rows: ClassVar[str] = "rows"

    directory: Path
    tokenizer: Encoder
    splits: dict[str, Store]

    def split(self, name: str) -> Store:
        """Returns the store of the split `name`; raises DataError if there is no such split."""
        if name not in self.splits:
            raise DataError(
                f"there are no {name} {self.rows}, only {', '.join(self.splits)}; name some with "
                f"Data.{name}"
            )
        return self.splits[name]

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns a JSON description of each split, by name: the number of rows, the size in bytes,
        the hash of the content, and the source files.
        """
        return cache.describe_splits(self.directory, self.splits, self.rows)


class Preparation(abc.ABC):
    """Base class that prepares and opens the rows that a config section describes.

    Each kind of rows has a subclass, which defines how rows are read, encoded and stored.

    Args:
      section: the section of the config that names sources and settings.
      progress: True shows a progress bar on a terminal, and messages for the user.

    Attributes:
      dataset: the subclass of RowCorpus of which `open` returns an instance.
      kind: the name of the kind of rows. It is a part of the key in the cache, the hash that names
        the directory of the prepared data.
      encoding: the noun for the object that encodes rows, such as "tokenizer" or "vocabulary".
      tokenizer: the object that encodes rows; None until it has been loaded or trained.
      shares: for each split that is held out of Data.train, its fraction of the training rows.
      endings: suffixes of the files that are read from directories.
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
        """Opens all splits; prepares the data first if necessary.

        Returns:
          An instance of the class `dataset`.

        Raises:
          DataError: a source cannot be read, or belongs to two splits.
        """
        hashes = {
            split: [] if split in self.shares else self.hashes(getattr(self.section, split))
            for split in SPLITS
        }
        self.check_sources(hashes)
        more = {"kind": self.kind, **self.key_values()}
        directory = cache.prepared(self.section, hashes, self._build, **more)
        manifest = cache.read_manifest(directory)
        file = manifest.get(self.encoding, {}).get("file", f"{self.encoding}.json")
        encoder = self.load_prepared(directory / file)
        return self._opened(directory, encoder, manifest["splits"])

    def open_split(self, split: str, encoder: Any, known: Path | None = None) -> Any:
        """Opens a single split; prepares the split first if necessary.

        Args:
          split: the name of the split.
          encoder: the object that encodes rows, such as the tokenizer of a trained model.
          known: a directory in which a run has prepared this split before; None if there is none.
            The directory is used again if the split is held out of the training rows, or if the
            sources are unchanged or cannot be read any more.

        Returns:
          An instance of the class `dataset` with this split.

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
            encoder=encoder.fingerprint, **self.values_from_train(),
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
        """Yields the rows of a split, and a BadRow (name and problem) for each unusable row.

        If the split is held out of Data.train, its rows are selected from the training sources.
        The rows of "train" are the training rows that are not held out.
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
        """Yields all rows of some sources, and a BadRow (name and problem) for each unusable row.

        Args:
          split: the name of the split, for error messages.
          names: the names of the sources, such as files and directories.
        """

    @abc.abstractmethod
    def content(self, row: Any) -> str:
        """Returns a text that represents the content of a row.

        Rows with the same content are assigned to the same split.
        """

    def values_from_train(self) -> dict[str, Any]:
        """Returns values, as JSON, that follow from the training rows and determine other splits.

        Such values are, for example, the names of classes. They are a part of the key under which a
        single split is cached. The encoder is not included, because it is always a part of the key.
        """
        return {}

    def load_prepared(self, file: Path) -> Any:
        """Returns the object that encoded the rows, which `file` among the prepared data holds."""
        return self.load(str(file))

    @abc.abstractmethod
    def load(self, name: str) -> Any:
        """Returns the object that encodes rows. Its `fingerprint` is a hash that identifies it.

        Args:
          name: the path of a file that contains the object, or the value of the config's setting.

        Raises:
          DataError: the file is missing or damaged.
          ConfigError: the setting is not valid.
        """

    @abc.abstractmethod
    def open_store(self, directory: Path, encoder: Any) -> RowStore:
        """Returns the opened store of a split.

        Args:
          directory: the directory of the store.
          encoder: the object that encoded the rows.
        """

    @abc.abstractmethod
    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Returns the hashes of all files of some sources, given the names of the sources."""

    def left_out(self, name: str) -> str:
        """Returns a sentence about the files of a source that are not read; "" if all are read.

        `name` is the name of the source.
        """
        return sources.left_out(name, self.endings)

    def check_sources(self, hashes: cache.Hashes) -> None:
        """Raises DataError if two splits have a file in common.

        Args:
          hashes: hashes of the files of each split.
        """
        cache.refuse_shared(hashes)

    def key_values(self) -> dict[str, Any]:
        """Returns values, as JSON, that determine the data in addition to settings and sources.

        The values are a part of the key in the cache.
        """
        return {}

    def begin(self, directory: Path) -> dict[str, Any]:
        """Creates the object that encodes rows, and saves it in `directory`.

        The method is called before the first row is written. The default creates nothing.

        Returns:
          Entries of the manifest that describe the object.
        """
        return {}

    @abc.abstractmethod
    def write(self, split: str, directory: Path, tally: Tally) -> str:
        """Writes the store of a split, and returns a line that tells the user what was written.

        Args:
          split: the name of the split; the method is called for "train" first.
          directory: the directory of the store.
          tally: counts the rows, and removes rows that cannot be used.
        """

    def _build(self, directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
        cache.print_unread_files(self.section, SPLITS, self.left_out, self.progress)
        described = self.begin(directory)
        splits = [split for split in SPLITS if getattr(self.section, split)]
        return {**self._write(splits, directory), **described}

    def _write(self, splits: Sequence[str], directory: Path) -> dict[str, Any]:
        """Writes the stores of some splits, and returns the manifest's entries about the splits."""
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
    """Base class for sections whose setting `tokenizer` names or trains a tokenizer.

    Attributes:
      special: ids of the special pieces that a trained tokenizer gets.
    """

    special: Special

    @abc.abstractmethod
    def texts(self) -> Iterable[str]:
        """Returns the texts of the training data, on which a tokenizer is trained."""

    def training_rows(self) -> Iterator[Any]:
        """Yields the usable training rows; raises DataError as `Tally.refuse_or_skip` does."""
        tally = Tally("train", "Data.errors = 'skip'")
        return tally.refuse_or_skip(self.read("train"), self.section.errors)

    @property
    def _size(self) -> int | None:
        return tokenizer_training.vocabulary_size(self.section.tokenizer, "Data.tokenizer")

    def key_values(self) -> dict[str, Any]:
        """Returns {"tokenizer": FINGERPRINT} if the section names a tokenizer, otherwise {}.

        The result is a part of the key in the cache. A trained tokenizer need not be included,
        because it follows from the training data.
        """
        return {} if self._size else {"tokenizer": self.load(self.section.tokenizer).fingerprint}

    def load_prepared(self, file: Path) -> Any:
        """Returns the tokenizer that encoded the rows. If the section names its file, the tokenizer
        is read from there, with the files beside it: models with the same tokenizer share prepared
        data, but not the settings beside it.
        """
        return self.load(str(file) if self._size else self.section.tokenizer)

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
