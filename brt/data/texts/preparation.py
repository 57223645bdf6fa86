"""What preparing sentences and questions has in common: once per content, in the cache.

A prepared corpus is a directory:

    train/ validation/ test/             splits (one without sources is absent)
    tokenizer.model, tokenizer.json or bytes.txt
    corpus.json                          what it was made of; written last
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from brt import config
from brt.config.fields import cached_settings
from brt.data import manifests, preparation, sources, tokenizer_training
from brt.data.pairs.sources import Tally
from brt.data.sources import FileHash
from brt.data.splits import SPLITS
from brt.data.texts import generated, tokenization
from brt.data.texts.tokenization import TextTokenizer
from brt.errors import DataError

Section = TypeVar("Section", config.Sentences, config.Questions)


class Kind(NamedTuple):
    """Sentences or questions.

    Attributes:
      name: tells kinds of one section apart.
      section: of the config.
      endings: of files in directories.
      version: of what is made up; other texts are another version.
      texts: of the training data, to train a tokenizer on.
      write: a split into its directory there; returns a line about it, and what it left out.
    """

    name: str
    section: str
    endings: tuple[str, ...]
    version: int
    texts: Callable[[Any], Iterable[str]]
    write: Callable[[Any, str, TextTokenizer, Path], tuple[str, Tally]]


def prepare(section: Section, kind: Kind, progress: bool) -> Path:
    """The directory of a prepared corpus; it is made first where that was not done yet.

    The content of every file is hashed, so a changed file never meets a stale store.

    Raises:
      DataError: a source cannot be read as asked, or a file is in two splits.
    """
    hashes = {split: _hashes(getattr(section, split), kind) for split in SPLITS}
    preparation.refuse_shared(hashes, kind.section)
    settings = cached_settings(section)
    content = {
        "format": manifests.FORMAT,
        "kind": kind.name,
        "sources": {split: getattr(section, split) for split in SPLITS},
        "files": hashes,
        "settings": settings,
    }
    named = f"{kind.section}.tokenizer"
    if not tokenizer_training.vocabulary_size(section.tokenizer, named):
        content["tokenizer"] = tokenization.load(section.tokenizer, named).fingerprint
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    directory = preparation.cache_directory(section) / key[:32]
    files = {split: [file._asdict() for file in found] for split, found in hashes.items()}
    facts = {"key": key, "settings": settings, "sources": files}
    preparation.make(directory, key, lambda place: _build(section, kind, place, facts, progress))
    return directory


def open_tokenizer(directory: Path) -> TextTokenizer:
    """The tokenizer of a prepared corpus."""
    name = preparation.read_manifest(directory)["tokenizer"]["file"]
    return tokenization.load(str(directory / name), "the tokenizer")


def _build(
    section: Any, kind: Kind, directory: Path, facts: Mapping[str, Any], progress: bool
) -> None:
    setting = f"{kind.section}.tokenizer"
    if tokenizer_training.vocabulary_size(section.tokenizer, setting):
        preparation.say("training a tokenizer", progress)
    tokenizer = tokenization.make(
        section.tokenizer, setting, directory, lambda: kind.texts(section), preparation.SEED
    )
    splits = [split for split in SPLITS if getattr(section, split)]
    for split in splits:
        (directory / split).mkdir()
        described, tally = kind.write(section, split, tokenizer, directory)
        if tally.bad:
            preparation.say(tally.described(), progress)
        preparation.say(f"prepared {split}: {described}", progress)
    used = {"file": tokenizer.file[0], "name": section.tokenizer,
            "fingerprint": tokenizer.fingerprint}  # fmt: skip
    manifest = {**facts, "splits": splits, "tokenizer": used}
    manifests.write(directory / preparation.MANIFEST, manifest)


def settle(tally: Tally, section: Any, split: str) -> None:
    """Raises DataError where a split has bad rows that are not to be skipped, or no others."""
    if section.errors == "refuse":
        tally.refuse()
    if tally.bad == tally.rows:
        named = f"{type(section).__name__}.{split} = {getattr(section, split)}"
        raise DataError(tally.described() if tally.rows else f"{named} has no row")


def _hashes(names: Sequence[str], kind: Kind) -> list[FileHash]:
    found = []
    for name in names:
        if name.startswith(generated.PREFIX):
            made = f"{kind.section} {kind.version} {generated.parse(name).name}"
            found.append(FileHash(name, 0, hashlib.sha256(made.encode()).hexdigest()))
        else:
            found += sources.hashes([name], kind.endings)
    return found
