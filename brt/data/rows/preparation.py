"""From a section of the config to stores of its rows: once per content, in the cache.

A prepared corpus is a directory (see `brt.data.cache`):

    train/ validation/ test/   stores (a split without sources is absent)
    tokenizer.* or another     what encodes rows
    corpus.json                what it was made of; written last
"""

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from brt.data import cache, tokenizer_training
from brt.data.rows.store import RowStore
from brt.data.rows.tally import Tally
from brt.data.sources import FileHash
from brt.data.splits import SPLITS
from brt.data.tokenizer_training import Special
from brt.errors import DataError

Encoder = TypeVar("Encoder")
Store = TypeVar("Store")


@dataclasses.dataclass(frozen=True, eq=False)
class RowCorpus(Generic[Encoder, Store]):
    """Prepared rows, opened.

    Attributes:
      section: of the config, that names their sources.
      rows: what they are, in the plural.
    """

    section: ClassVar[str]
    rows: ClassVar[str]

    directory: Path
    tokenizer: Encoder
    splits: dict[str, Store]

    def split(self, name: str) -> Store:
        """The store of a split; raises DataError where there is none."""
        if name not in self.splits:
            raise DataError(
                f"there are no {name} {self.rows}, only {', '.join(self.splits)}; name some with "
                f"{self.section}.{name}"
            )
        return self.splits[name]


class Preparation(abc.ABC):
    """What prepares and opens the rows of a section; each kind of rows has its own.

    Attributes:
      corpus: what it opens.
      kind: tells kinds of rows apart.
      encoding: what encodes rows, in a word.
    """

    corpus: type[RowCorpus]
    kind: str
    encoding = "tokenizer"

    def __init__(self, section: Any, progress: bool):
        self.section, self.progress = section, progress
        self.name = type(section).__name__

    def open(self) -> Any:
        """The corpus; it is made first where that was not done yet.

        Raises:
          DataError: a source cannot be read as asked, or is in two splits.
        """
        hashes = {split: self.hashes(getattr(self.section, split)) for split in SPLITS}
        self.check_sources(hashes)
        more = {"kind": self.kind, **self.decisive()}
        directory = cache.prepared(self.section, hashes, self._build, **more)
        manifest = cache.read_manifest(directory)
        file = manifest.get(self.encoding, {}).get("file", f"{self.encoding}.json")
        encoder = self.load(str(directory / file))
        splits = {name: self.open_store(directory / name, encoder) for name in manifest["splits"]}
        for name, store in splits.items():
            if store.written_with not in ("", encoder.fingerprint):
                raise DataError(
                    f"{directory / name} was written with another {self.encoding} than {file}; "
                    f"delete {directory} and prepare it again"
                )
        return self.corpus(directory, encoder, splits)

    @abc.abstractmethod
    def load(self, name: str) -> Any:
        """What encodes rows, from a file or its setting; it has a `fingerprint`.

        Raises:
          DataError: the file is missing or damaged.
          ConfigError: the setting is none.
        """

    @abc.abstractmethod
    def open_store(self, directory: Path, encoder: Any) -> RowStore:
        """The store of a split."""

    @abc.abstractmethod
    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Of the files behind sources."""

    def check_sources(self, hashes: cache.Hashes) -> None:
        """Raises DataError for a file in two splits."""
        cache.refuse_shared(hashes, self.name)

    def decisive(self) -> dict[str, Any]:
        """What decides the content beside settings and sources."""
        return {}

    def begin(self, directory: Path) -> dict[str, Any]:
        """Makes what encodes rows; returns what the manifest says of it."""
        return {}

    @abc.abstractmethod
    def write(self, split: str, directory: Path, tally: Tally) -> str:
        """Writes the store of a split, train first; returns a line about it."""

    def _build(self, directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
        described = self.begin(directory)
        splits = [split for split in SPLITS if getattr(self.section, split)]
        for split in splits:
            place = directory / split
            place.mkdir()
            with cache.bar(split, self.progress, unit=" rows") as bar:
                tally = Tally(split, f"{self.name}.errors = 'skip'", bar.update)
                line = self.write(split, place, tally)
            if tally.bad:
                cache.say(tally.described(), self.progress)
            cache.say(f"prepared {split}: {line}", self.progress)
        return {"splits": splits, **described}


class TokenizedPreparation(Preparation):
    """One whose section names a tokenizer, or asks to train one on the training data.

    Attributes:
      special: ids of one that is trained.
      tokenizer: has a `file`, too: the name of a copy, its content.
    """

    special: Special
    tokenizer: Any

    @abc.abstractmethod
    def texts(self) -> Iterable[str]:
        """Of the training data."""

    @property
    def _size(self) -> int | None:
        return tokenizer_training.vocabulary_size(self.section.tokenizer, f"{self.name}.tokenizer")

    def decisive(self) -> dict[str, Any]:
        return {} if self._size else {"tokenizer": self.load(self.section.tokenizer).fingerprint}

    def begin(self, directory: Path) -> dict[str, Any]:
        if size := self._size:
            cache.say(f"training a tokenizer of {size} pieces", self.progress)
            path = directory / "tokenizer.model"
            tokenizer_training.train_sentencepiece(
                ([text] for text in self.texts()), size, path, seed=cache.SEED,
                special=self.special, setting=f"{self.name}.tokenizer",
            )  # fmt: skip
            self.tokenizer = self.load(str(path))
        else:
            self.tokenizer = self.load(self.section.tokenizer)
            (directory / self.tokenizer.file[0]).write_bytes(self.tokenizer.file[1])
        name, fingerprint = self.section.tokenizer, self.tokenizer.fingerprint
        file = self.tokenizer.file[0]
        return {"tokenizer": {"file": file, "name": name, "fingerprint": fingerprint}}
