"""Prepares the data that a config section names: documents, or rows such as pairs of texts.

The data are read from files, encoded as ids, and stored in a directory, which is in the cache or at
a place that the user names:

    train/ validation/ test/         stores (a split without data is absent)
    tokenizer.* or vocabulary.json   the object that encodes the data
    quarantine.jsonl                 documents that could not be read, if there are any
    corpus.json                      the manifest: sources and settings; written last

While documents are written, the subdirectory `partial` has the files of unfinished stores, from
which the next process continues if this one is killed.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from tqdm import tqdm

from brt import config, durable, output, storage, untrusted, user_cache
from brt.config.checks import column, share_of
from brt.config.fields import cached_settings
from brt.data import (
    chat,
    generated,
    lost_bytes,
    manifests,
    originals,
    quarantine,
    sources,
    text_tokenizers,
    token_store,
    tokenizer_training,
    tokenizers,
)
from brt.data.formats import DOCUMENTS
from brt.data.quarantine import BadRow, Tally
from brt.data.sources import FileHash
from brt.data.splits import SPLITS, Plan, Shares, fractions_of
from brt.data.text_tokenizers import TextTokenizer
from brt.data.token_store import TokenStore
from brt.data.tokenizer_training import Special
from brt.data.tokenizers import Tokenizer
from brt.errors import DataError
from brt.formatting import counted

Encoder = TypeVar("Encoder")
Opened = TypeVar("Opened")
Row = TypeVar("Row")
Hashes = Mapping[str, Sequence[FileHash]]  # the hashes of the files of each split
TOGETHER = 256  # This number of rows is tokenized in parallel.
MANIFEST = manifests.CORPUS
# This is the version of the code that reads files. It is increased when a change of the code makes
# the same files yield other texts or rows.
READING = 3
# This seed determines the sample of text that a tokenizer is trained on.
SEED = 0
NAMED = 3  # The description of a split lists at most this number of names of documents.
_KIND = {
    "key": str,
    "sources": {str: [{"name": str, "bytes": int, "sha256": str}]},
    "splits": [str],
    "held_out?": {str: str},
    "quarantined?": int,
    "tokenizer?": {"file": str, "name": str},
    "vocabulary?": {"file": str},
}


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the manifest of a directory of prepared data; raises DataError if it is damaged."""
    manifest = manifests.read(directory / MANIFEST, _KIND)
    with manifests.explaining_damage(directory, "corpus"):
        if coverage := manifest.get("tokenizer", {}).get("coverage"):
            untrusted.check(coverage, {"fraction": float}, "coverage")
        if not {*manifest["splits"]} <= {*SPLITS}:
            raise ValueError(f"{MANIFEST} has the splits {', '.join(manifest['splits'])}")
        for kind in ("tokenizer", "vocabulary"):
            name = manifest[kind]["file"] if kind in manifest else MANIFEST
            if Path(name).name != name or not (directory / name).is_file():
                raise ValueError(f"{MANIFEST} names {name!r}, which is not there")
    return manifest


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus(Generic[Encoder, Opened]):
    """Prepared data that are opened for reading; `tokenizer` is the object that encoded them."""

    rows: ClassVar[str] = "rows"  # the plural noun for rows in messages, such as "pairs"

    directory: Path
    tokenizer: Encoder
    splits: dict[str, Opened]

    def split(self, name: str) -> Opened:
        if name not in self.splits:
            raise DataError(
                f"there are no {name} {self.rows}, only {', '.join(self.splits)}; name some with "
                f"Data.{name}"
            )
        return self.splits[name]

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns a JSON description of each split, by the name of the split.

        A description has the number of rows (its key is the value of `self.rows`, such as "pairs"),
        the size in bytes, the names of a few rows, the hash of the content, a phrase that says how
        the split was held out of the training data ("" if it was not), and the source files ([] if
        the directory has no manifest).
        """
        known = (self.directory / MANIFEST).is_file()
        manifest = read_manifest(self.directory) if known else {"sources": {}}
        descriptions = {}
        stores: Mapping[str, Any] = self.splits
        for split, store in stores.items():
            files = manifest["sources"].get(split, [])
            size = getattr(store, "manifest", {}).get("bytes") or sum(f["bytes"] for f in files)
            descriptions[split] = {
                self.rows: len(store),
                **({"bytes": size} if size else {}),
                "names": list(getattr(store, "names", ())[:NAMED]),
                "sha256": store.fingerprint,
                "held_out": manifest.get("held_out", {}).get(split, ""),
                "sources": files,
            }
        return descriptions


class Preparation(abc.ABC):
    """Base class that prepares and opens the data that a config section describes.

    Each kind of data has a subclass, which defines how the data are read, encoded and stored. The
    section has the fields train, validation, test and cache_dir.
    """

    dataset: type[Corpus]  # `open` returns an instance of this class
    store: type[Any]  # the class of the stores, whose method `open` opens a directory
    kind: str  # the name of the kind of data, a part of the key in the cache
    encoding = "tokenizer"  # what encodes the data: "tokenizer" or, in subclasses, "vocabulary"
    tokenizer: Any = None  # the object that encodes the data; None until it was loaded or trained
    endings: tuple[str, ...] = ()  # suffixes of the files that are read from directories

    def __init__(self, section: Any, progress: bool = True):
        self.section, self.progress = section, progress
        self.shares = self.held_out_shares()

    def held_out_shares(self) -> dict[str, float]:
        """Returns the fraction of Data.train that each held-out split gets, by the split's name."""
        shares = {split: share_of(self.section, split) for split in SPLITS[1:]}
        return {split: share for split, share in shares.items() if share}

    def open(self, output: Path | str | None = None) -> Any:
        """Opens all splits as an instance of `dataset`; prepares the data first if necessary.

        `output` is the directory to write; None writes to the cache. A source that cannot be read,
        or an `output` with other content, raises DataError.
        """
        hashes = {
            split: [] if split in self.shares else self.hashes(getattr(self.section, split))
            for split in SPLITS
        }
        self.check_sources(hashes)
        return self.open_prepared(self._prepared(hashes, self._build, output, self.key_values()))

    def open_prepared(self, directory: Path) -> Any:
        """Opens all splits in a directory of prepared data; damage raises DataError."""
        manifest = read_manifest(directory)
        file = manifest.get(self.encoding, {}).get("file", f"{self.encoding}.json")
        return self._opened(directory, self.load_prepared(directory / file), manifest["splits"])

    def open_split(self, split: str, encoder: Any, known: Path | None = None) -> Any:
        """Opens a single split as an instance of `dataset`; prepares it first if necessary.

        `encoder` may be the tokenizer of a trained model. `known` is a directory in which a run has
        prepared this split before. It is used again if the split is held out of Data.train, or if
        the sources of the split are unchanged or cannot be read any more. Sources of other splits
        are not read, except those of Data.train if the split is held out of them.
        """
        if split not in self.shares and not getattr(self.section, split):
            raise DataError(
                f"there are no {split} {self.dataset.rows}; name some with Data.{split}"
            )
        self.tokenizer = encoder
        return self._opened(self._prepared_split(split, known), encoder, (split,))

    def _prepared_split(self, split: str, known: Path | None) -> Path:
        """Returns a directory with a prepared split; prepares the split if necessary.

        The directory is `known` in the cases that `open_split` describes.
        """
        if known and not ((known / MANIFEST).is_file() and (known / split).is_dir()):
            known = None
        if known and split in self.shares:
            return known
        try:
            # Training data, and splits held out of them, depend on all sources of Data.train.
            hashes: Hashes
            if split in ("train", *self.shares):
                hashes = {**dict.fromkeys(SPLITS, []), "train": self.hashes(self.section.train)}
            else:
                hashes = {split: self.hashes(getattr(self.section, split))}
        except DataError:
            if not known:
                raise
            return known
        if known and _sources(hashes)[split] == read_manifest(known)["sources"][split]:
            return known
        more = {"only": split, "encoder": self.tokenizer.fingerprint, **self.values_from_train()}
        return self._prepared(hashes, functools.partial(self.write_splits, (split,)), None, more)

    def _prepared(
        self,
        hashes: Hashes,
        build: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]],
        output: Path | str | None,
        more: Mapping[str, Any],
    ) -> Path:
        """Returns the directory of prepared data; prepares them if necessary.

        Args:
          hashes: hashes of the files of each split. The name of the directory in the cache depends
            on them, so that data are prepared again if a file has changed.
          build: function that writes prepared data. Its arguments are the directory to fill and the
            settings and sources that the manifest will have; it returns further entries of the
            manifest.
          output: the directory to write; None selects a directory in the cache, named by a hash. If
            the directory contains other data, DataError is raised.
          more: further values, as JSON, that determine the content.
        """
        section = self.section
        facts = {"settings": cached_settings(section), "sources": _sources(hashes)}
        content = {
            "format": manifests.FORMAT,
            "reading": READING,
            "sources": {split: getattr(section, split) for split in hashes},
            "files": hashes,
            "settings": facts["settings"],
            "kind": self.kind,
            **more,
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        if output is None:
            directory = Path(section.cache_dir or user_cache.writable()) / key[:32]
        else:
            directory = Path(output)
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            manifests.remove_abandoned(directory)
        else:
            where = "Data.cache_dir" if output is None else ""
            with manifests.atomic_directory(directory, setting=where, key=key) as temporary:
                described = build(temporary, facts)
                manifests.write(temporary / MANIFEST, {"key": key, **facts, **described})
        if not (directory / MANIFEST).exists() or read_manifest(directory)["key"] != key:
            what = "is damaged; delete it" if output is None else (
                "contains something else; delete it or name another directory"
            )  # fmt: skip
            raise DataError(f"{directory} {what}")
        return directory

    def _opened(self, directory: Path, encoder: Any, splits: Iterable[str]) -> Any:
        opened = {name: self.open_store(directory / name, encoder) for name in splits}
        for name, store in opened.items():
            if store.written_with not in ("", encoder.fingerprint):
                raise DataError(
                    f"{directory / name} was written with another {self.encoding} than "
                    f"{encoder.name}; delete {directory} and prepare it again"
                )
        return self.dataset(directory, encoder, opened)

    def values_from_train(self) -> dict[str, Any]:
        """Returns values, such as names of classes, that follow from the training rows, as JSON.

        The content of other splits depends on these values, so they are a part of the key under
        which a single split is cached. The encoder is always a part of this key.
        """
        return {}

    def load_prepared(self, file: Path) -> Any:
        """Returns the object that encoded the data; `file` is its place in the prepared data."""
        return self.load(str(file))

    @staticmethod
    @abc.abstractmethod
    def load(name: str) -> Any:
        """Returns the object that encodes the data; its `fingerprint` is a hash that identifies it.

        `name` is the path of a file that contains the object, or the value of a setting such as
        Data.tokenizer.
        """

    def open_store(self, directory: Path, encoder: Any) -> Any:
        """Returns the opened store of a split, which `encoder` has encoded."""
        return self.store.open(directory)

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Returns the hashes of all files of some sources, given the names of the sources."""
        return sources.hashes(names, self.endings)

    def left_out(self, name: str) -> str:
        """Returns a sentence about the files of a source that are not read; "" if all are read."""
        return sources.left_out(name, self.endings)

    def check_sources(self, hashes: Hashes) -> None:
        """Raises DataError if two splits share a file, except files of TensorFlow datasets."""
        seen: dict[str, tuple[str, str]] = {}
        for split, file in ((split, file) for split, files in hashes.items() for file in files):
            other, name = seen.setdefault(file.sha256, (split, file.name))
            if other != split and not file.name.startswith("tfds:"):
                raise DataError(
                    f"{file.name} of Data.{split} has the same content as {name} of "
                    f"Data.{other}; take it out of one of them"
                )

    def key_values(self) -> dict[str, Any]:
        """Returns values, as JSON, that are a part of the key under which all splits are cached.

        The settings and the sources are always a part of this key.
        """
        return {}

    def begin(self, directory: Path) -> dict[str, Any]:
        """Creates and saves the object that encodes the data, before the first store is written.

        Returns the manifest's entries about the object. By default, there is no object, and the
        result is {}.
        """
        return {}

    @abc.abstractmethod
    def write_splits(
        self, splits: Sequence[str], directory: Path, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Writes the stores of some splits, and returns the manifest's entries about the splits.

        `facts` has the settings and sources, as in `_prepared`.
        """

    def _build(self, directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
        names = (name for split in SPLITS for name in getattr(self.section, split))
        for line in filter(None, map(self.left_out, dict.fromkeys(names))):
            self.say(line)
        described = self.begin(directory)
        splits = [split for split in SPLITS if split in self.shares or getattr(self.section, split)]
        return {**self.write_splits(splits, directory, facts), **described}

    def say(self, text: str) -> None:
        """Prints a line to stderr, unless the caller wants no progress."""
        if self.progress:
            output.say(text)

    def bar(self, split: str, **unit: Any) -> tqdm:
        """Returns a progress bar, which only a terminal shows; `unit` has arguments of tqdm."""
        hidden = not (self.progress and sys.stderr.isatty())
        return tqdm(desc=f"preparing {split}", disable=hidden, **unit)


def _sources(hashes: Hashes) -> dict[str, list[dict[str, Any]]]:
    return {split: [file._asdict() for file in files] for split, files in hashes.items()}


class RowPreparation(Preparation):
    """Base class that prepares rows, such as pairs of texts."""

    def read(self, split: str) -> Iterator[Any]:
        """Yields the rows of a split, and a BadRow (name and problem) for each unusable row."""
        # A split that shares no sources with another split gets all rows of its sources. The rows
        # of Data.train are divided among "train" and the splits that are held out of it.
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

    def usable(self, split: str, tally: Tally | None = None) -> Iterator[Any]:
        """Yields the usable rows of a split; raises DataError as `Tally.refuse_or_skip` does."""
        return (tally or Tally(split)).refuse_or_skip(self.read(split), self.section.errors)

    @abc.abstractmethod
    def rows(self, split: str, names: Sequence[str]) -> Iterator[Any]:
        """Yields all rows of the sources `names`, and a BadRow for each unusable row."""

    @abc.abstractmethod
    def content(self, row: Any) -> str:
        """Returns a text that represents a row; rows with equal texts belong to the same split."""

    @abc.abstractmethod
    def write(self, split: str, directory: Path, tally: Tally) -> str:
        """Writes the store of a split, and returns a line for the user.

        `tally` counts the rows, and removes rows that cannot be used. The split "train" is written
        before the other splits.
        """

    def write_splits(
        self, splits: Sequence[str], directory: Path, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        held_out = {
            split: f"{share:.0%} of the rows of Data.train"
            for split, share in self.shares.items()
            if split in splits
        }
        for split in splits:
            place = directory / split
            place.mkdir()
            with self.bar(split, unit=" rows") as bar:
                tally = Tally(split, progress=bar.update)
                line = self.write(split, place, tally)
            if tally.bad:
                self.say(tally.described())
            origin = f" ({held_out[split]})" if split in held_out else ""
            self.say(f"prepared {split}{origin}: {line}")
        return {"splits": list(splits), "held_out": held_out}


def in_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yields rows in lists of at most `TOGETHER`, which are tokenized in parallel."""
    remaining = iter(rows)
    return iter(lambda: list(itertools.islice(remaining, TOGETHER)), [])


class TokenizedPreparation(Preparation):
    """Base class for sections whose setting `tokenizer` names or trains a tokenizer."""

    special: Special  # ids of the special pieces that a trained tokenizer gets

    @abc.abstractmethod
    def texts(self) -> Iterable[Iterable[str]]:
        """Returns the texts of the training data, each in chunks, to train a tokenizer on."""

    @property
    def _size(self) -> int | None:
        return tokenizer_training.vocabulary_size(self.section.tokenizer)

    def key_values(self) -> dict[str, Any]:
        # A trained tokenizer need not be included, because it follows from the training data.
        return {} if self._size else {"tokenizer": self.load(self.section.tokenizer).fingerprint}

    def load_prepared(self, file: Path) -> Any:
        """Returns the tokenizer that encoded the data.

        A tokenizer that brt has trained is in `file`. Any other tokenizer is read from the file
        that the section names, together with the settings beside this file, because models with
        equal tokenizers share prepared data, but may differ in these settings.
        """
        return self.load(str(file) if self._size else self.section.tokenizer)

    def begin(self, directory: Path) -> dict[str, Any]:
        coverage = None
        if size := self._size:
            self.say(f"training a tokenizer of {size} pieces")
            path = directory / "tokenizer.model"
            coverage = tokenizer_training.train_sentencepiece(
                self.texts(), size, path, seed=SEED, special=self.special
            )
            self.tokenizer = self.load(str(path))
        else:
            self.tokenizer = self.load(self.section.tokenizer)
            (directory / self.tokenizer.file[0]).write_bytes(self.tokenizer.file[1])
        described = {
            "file": self.tokenizer.file[0],
            "name": self.section.tokenizer,
            "fingerprint": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "coverage": coverage and {**coverage._asdict(), "fraction": coverage.fraction},
        }
        return {"tokenizer": described}


class TextPreparation(TokenizedPreparation, RowPreparation):
    """Base class that prepares rows of texts, which are read from files or generated."""

    special = text_tokenizers.ROBERTA
    version: int  # the version of the generated texts, which is increased when they change

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Returns a hash of each file, and of the name and version of each generated source."""
        result = []
        for name in names:
            if name.startswith(generated.PREFIX):
                kind = f"{type(self.section).__name__} {self.version}"
                result.append(FileHash(name, 0, generated.digest(name, kind)))
            else:
                result += super().hashes((name,))
        return result

    @staticmethod
    def load(name: str) -> TextTokenizer:
        return text_tokenizers.load(name)


class Dataset(Corpus[Tokenizer, TokenStore]):
    """Prepared documents that are opened for reading."""

    rows = "documents"


class DocumentPreparation(TokenizedPreparation):
    """Prepares and opens the documents that the config section `Data` describes.

    If `Data.store` names a directory of prepared data, all its splits are opened.
    """

    dataset, store, kind, endings = Dataset, TokenStore, "documents", DOCUMENTS
    special = tokenizer_training.LANGUAGE_MODEL
    load = staticmethod(tokenizers.load)
    _wanted: Sequence[str] = SPLITS  # the splits whose documents are read

    def held_out_shares(self) -> dict[str, float]:
        return fractions_of(self.section)

    def key_values(self) -> dict[str, Any]:
        values = super().key_values()
        if values and column(self.section, "messages"):
            values["template"] = chat.fingerprint(self.load(self.section.tokenizer))
        return values

    def values_from_train(self) -> dict[str, Any]:
        """Returns a hash of the chat template, which the tokenizer's fingerprint does not cover."""
        messages = column(self.section, "messages")
        return {"template": chat.fingerprint(self.tokenizer)} if messages else {}

    @functools.cached_property
    def _plan(self) -> Plan:
        return Plan(self.section, self._wanted)

    def open(self, output: Path | str | None = None) -> Dataset:
        if self.section.store:
            return self.open_prepared(self._stored())
        return self._say_quarantined(super().open(output))

    def open_split(self, split: str, encoder: Tokenizer, known: Path | None = None) -> Dataset:
        if self.section.store:
            return self.open_prepared(self._stored())
        self._wanted = (split,)
        return self._say_quarantined(super().open_split(split, encoder, known))

    def _stored(self) -> Path:
        directory = Path(storage.local(self.section.store))
        if not directory.is_absolute() and not directory.exists():
            raise DataError(
                f"{directory} is not in {Path.cwd()}; name the whole path with Data.store, or run "
                "the command in the directory that has it"
            )
        return directory

    def _say_quarantined(self, dataset: Dataset) -> Dataset:
        if count := read_manifest(dataset.directory).get("quarantined"):
            phrase = "1 document is" if count == 1 else f"{count:,} documents are"
            where = dataset.directory / quarantine.NAME
            self.say(f"{phrase} left out because of errors: {where}")
        return dataset

    def load_prepared(self, file: Path) -> Tokenizer:
        return self.load(str(file))

    def texts(self) -> Iterator[Iterator[str]]:
        return (document.chunks for document in self._plan.documents("train"))

    def begin(self, directory: Path) -> dict[str, Any]:
        # If an interrupted process has stored the tokenizer, this tokenizer is loaded.
        known = directory / "partial" / "tokenizer.json"
        if known.exists():
            described = untrusted.read_json(known, {"file": str, "name": str})
            self.tokenizer = self.load(str(directory / described["file"]))
            return {"tokenizer": described}
        entries = super().begin(directory)
        stored = originals.stored(self.tokenizer.file, self.tokenizer.beside)
        for name, content in stored.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            durable.write(directory / name, content, below=directory)
        known.parent.mkdir(exist_ok=True)
        durable.write(known, json.dumps(entries["tokenizer"]).encode())
        return entries

    def write_splits(
        self, splits: Sequence[str], directory: Path, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        plan, partial = self._plan, directory / "partial"
        held_out = {split: plan.held_out[split] for split in splits if split in plan.held_out}
        written: dict[str, TokenStore] = {}
        for split in splits:
            store = self._write(split, directory, facts)
            for other, earlier in written.items():
                _refuse_shared_texts(partial, {other: earlier, split: store})
            written[split] = store
            counts, origin = store.manifest, f" ({held_out[split]})" if split in held_out else ""
            if not sys.stderr.isatty():  # A terminal shows a progress bar instead.
                self.say(
                    f"prepared {split}{origin}: {counted(counts['documents'], 'document')}, "
                    f"{counts['bytes']:,} bytes{' of completions' * (store.spans is not None)}, "
                    f"{counts['tokens']:,} tokens"
                    + "".join(f"; {clause}" for clause in [_lost(store)] if clause)
                )
        plan.bad.write(directory)
        shutil.rmtree(partial)
        return {"splits": list(splits), "held_out": held_out, "quarantined": len(plan.bad)}

    def _write(self, split: str, directory: Path, facts: Mapping[str, Any]) -> TokenStore:
        """Writes the store of a split, or completes one that an interrupted process has begun."""
        documents = self._plan.documents(split)
        if (directory / split / "manifest.json").exists():
            if self._plan.bad.limit:  # Reading the documents again finds those that cannot be read.
                deque(documents, maxlen=0)
            return TokenStore.open(directory / split)
        shutil.rmtree(directory / split, ignore_errors=True)
        partial = directory / "partial" / split
        if done := token_store.committed(partial):
            self.say(
                f"continuing with {split}: {counted(done.documents, 'document')} "
                f"({done.bytes:,} bytes) are prepared"
            )
        size = sum(file["bytes"] for file in facts["sources"].get(split, ())) or None
        with self.bar(split, total=size, unit="B", unit_scale=True) as bar:
            return token_store.write(
                directory / split, documents, self.tokenizer, settings=facts,
                progress=bar.update, partial=partial,
            )  # fmt: skip


def prepare(data: config.Data, output: Path | str | None = None, progress: bool = True) -> Dataset:
    """Opens the documents that a config section describes; see `Preparation.open`."""
    return DocumentPreparation(data, progress).open(output)


def summary(dataset: Dataset) -> str:
    """Returns a table of the splits, and lines about the tokenizer and the bytes that it loses."""
    lines = [
        f"{'split':10} {'documents':>10} {'tokens':>14} {'bytes':>14} {'words':>12} bytes/token"
    ]
    for split, store in dataset.splits.items():
        m = store.manifest
        lines.append(
            f"{split:10} {m['documents']:10,} {m['tokens']:14,} {m['bytes']:14,} "
            f"{m['words']:12,} {m['bytes'] / int(store.scored_counts.sum()):11.3f}"
        )
    if any(store.spans is not None for store in dataset.splits.values()):
        lines.append("bytes and words are those of completions")
    described = read_manifest(dataset.directory)["tokenizer"]
    line = f"tokenizer {described['name']}, {dataset.tokenizer.vocab_size:,} ids"
    if coverage := described.get("coverage"):
        line += f", trained on {coverage['fraction']:.1%} of the train text"
    lost = [f"{split}: {clause}" for split, s in dataset.splits.items() if (clause := _lost(s))]
    return "\n".join([*lines, line, *lost])


def _lost(store: TokenStore) -> str:
    """Returns a clause about the bytes of a split that the tokenizer loses; "" for none."""
    unknown = store.manifest["unknown_tokens"]
    return lost_bytes.loss_message(store.lost_bytes, int(store.bytes.sum()), unknown)


def _refuse_shared_texts(partial: Path, stores: Mapping[str, TokenStore]) -> None:
    """Raises DataError if a document of one split has the same text as a document of another.

    `stores` maps the names of two splits to their token stores. Documents of TensorFlow datasets in
    the second store are exempt. `partial` is the directory of the unfinished stores, which has a
    directory with digests for each split (see `token_store`).
    """
    (first, first_store), (second, second_store) = stores.items()
    earlier, later = (np.fromfile(partial / split / token_store.DIGESTS, "S32") for split in stores)
    for i in np.flatnonzero(np.isin(later, earlier)):
        name = second_store.names[i]
        if not name.startswith("tfds:"):
            other = first_store.names[np.flatnonzero(earlier == later[i])[0]]
            raise DataError(
                f"{name} of {second} has the same text as {other} of {first}; take it out of one "
                "of them"
            )
