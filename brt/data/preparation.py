"""From `config.Data` to token stores: once per content, in a cache or where the user says.

A prepared corpus is a directory:

    train/ validation/ test/             token stores (a split without documents is absent)
    tokenizer.model or tokenizer.json    the tokenizer
    corpus.json                          what it was made of; written last
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from brt import config
from brt.config.fields import cached_settings
from brt.data import manifests, sources, token_store, tokenizer_training, tokenizers
from brt.data.sources import FileHash
from brt.data.splits import SPLITS, Plan
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.errors import DataError

SEED = 0  # of the tokenizer's sample
MANIFEST = "corpus.json"


class Corpus(NamedTuple):
    """A prepared corpus, opened."""

    directory: Path
    tokenizer: Tokenizer
    splits: dict[str, TokenStore]

    def split(self, name: str) -> TokenStore:
        """The store of a split.

        Raises:
          DataError: the corpus has no such split.
        """
        if name not in self.splits:
            raise DataError(
                f"{self.directory} has no {name} documents, only {', '.join(self.splits)}; "
                f"name some with Data.{name}"
            )
        return self.splits[name]


def prepare(data: config.Data, output: Path | str | None = None, progress: bool = True) -> Corpus:
    """Opens the corpus that `data` describes; makes it first where it does not exist yet.

    The content of every file is hashed, so a changed file never meets a stale store.

    Args:
      output: where to write; None: in the cache, under a name made of all that decides
        the content.
      progress: show a bar on a terminal, else a line per split.

    Raises:
      DataError: a source cannot be read as asked, or `output` holds something else.
    """
    if data.store:
        return open_corpus(Path(data.store))
    hashes = {split: sources.hashes(getattr(data, split)) for split in SPLITS}
    refuse_shared(hashes)
    key = _key(data, hashes)
    directory = cache_directory(data) / key[:32] if output is None else Path(output)
    make(directory, key, lambda temporary: _build(data, temporary, key, hashes, progress))
    return open_corpus(directory)


def make(directory: Path, key: str, build: Callable[[Path], Any]) -> None:
    """Makes a prepared corpus with this key, unless it exists.

    Args:
      build: fills the directory that it is given; writes the key into the manifest.

    Raises:
      DataError: `directory` holds something else.
    """
    if not _occupied(directory):
        with manifests.atomic_directory(directory) as temporary:
            build(temporary)
    if _existing_key(directory) != key:
        raise DataError(f"{directory} holds something else; delete it or name another directory")


def open_corpus(directory: Path) -> Corpus:
    """Opens a directory that `prepare` wrote.

    Raises:
      DataError: it is missing, unfinished or damaged.
    """
    manifest = read_manifest(directory)
    name = manifest["tokenizer"]["file"]
    of_bytes = manifest["tokenizer"]["name"] == "bytes"
    tokenizer = tokenizers.load("bytes" if of_bytes else str(directory / name))
    splits = {split: TokenStore.open(directory / split) for split in manifest["splits"]}
    for split, store in splits.items():
        if store.manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            raise DataError(
                f"{directory / split} was written with another tokenizer than {name}; "
                f"prepare {directory} again"
            )
    return Corpus(directory, tokenizer, splits)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a prepared corpus was made of: sources, settings, tokenizer and its coverage."""
    return manifests.read(directory / MANIFEST)


def cache_directory(
    data: config.Data | config.Pairs | config.Speech | config.Sentences | config.Questions,
) -> Path:
    """Where corpora are kept that nobody gave a place."""
    if data.cache_dir:
        return Path(data.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "brt"


def _key(data: config.Data, hashes: Mapping[str, Sequence[FileHash]]) -> str:
    """sha256 of all that decides the content of the stores."""
    content = {
        "format": manifests.FORMAT,
        "sources": {split: getattr(data, split) for split in SPLITS},
        "files": hashes,
        "settings": cached_settings(data),
    }
    if data.tokenizer.endswith((".model", ".json")):
        content["tokenizer"] = tokenizers.load(data.tokenizer).fingerprint
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _occupied(directory: Path) -> bool:
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))


def _existing_key(directory: Path) -> str | None:
    try:
        return read_manifest(directory)["key"]
    except DataError:
        return None


def refuse_shared(hashes: Mapping[str, Sequence[FileHash]], section: str = "Data") -> None:
    """Raises DataError for a file in two splits, which makes every held-out number wrong."""
    seen: dict[str, tuple[str, str]] = {}
    for split, files in hashes.items():
        for file in files:
            other, name = seen.setdefault(file.sha256, (split, file.name))
            if other != split and not file.name.startswith("tfds:"):
                raise DataError(
                    f"{file.name} of {section}.{split} has the same content as {name} of "
                    f"{section}.{other}; take it out of one of them"
                )


def _build(
    data: config.Data,
    directory: Path,
    key: str,
    hashes: Mapping[str, Sequence[FileHash]],
    progress: bool,
) -> None:
    plan = Plan(data)
    tokenizer, described = _make_tokenizer(data, plan, directory, progress)
    settings = {
        "settings": cached_settings(data),
        "sources": {split: [file._asdict() for file in files] for split, files in hashes.items()},
    }
    for split in plan.splits:
        found = plan.documents(split)
        size = sum(file.bytes for file in hashes[split]) or None
        with _bar(f"preparing {split}", size, progress) as bar:
            store = token_store.write(
                directory / split, found, tokenizer, settings=settings, progress=bar.update
            )
        counts = store.manifest
        say(
            f"prepared {split}: {counts['documents']:,} documents, {counts['bytes']:,} bytes, "
            f"{counts['tokens']:,} tokens",
            progress and not sys.stderr.isatty(),
        )
    manifest = {"key": key, "splits": list(plan.splits), "tokenizer": described, **settings}
    manifests.write(directory / MANIFEST, manifest)


def _bar(text: str, size: int | None, progress: bool) -> tqdm:
    hidden = not (progress and sys.stderr.isatty())
    return tqdm(desc=text, total=size, unit="B", unit_scale=True, disable=hidden)


def say(text: str, progress: bool) -> None:
    """A line on stderr."""
    if progress:
        print(text, file=sys.stderr, flush=True)


def _make_tokenizer(
    data: config.Data, plan: Plan, directory: Path, progress: bool
) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, stored in the directory; trained on the train split where asked."""
    coverage = None
    path = directory / "tokenizer.model"
    if size := tokenizer_training.vocabulary_size(data.tokenizer):
        say(f"training a tokenizer of {size} pieces", progress)
        texts = (document.chunks for document in plan.documents("train"))
        coverage = tokenizer_training.train_sentencepiece(texts, size, path, seed=SEED)
        tokenizer = tokenizers.load(str(path))
    else:
        tokenizer = tokenizers.load(data.tokenizer)
        if tokenizer.name == "bytes":
            path = directory / "tokenizer.json"
            path.write_text(json.dumps({"name": tokenizer.name}) + "\n")
        else:
            path = path.with_suffix(Path(data.tokenizer).suffix)
            path.write_bytes(Path(data.tokenizer).read_bytes())
    described = {
        "file": path.name,
        "name": data.tokenizer,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "coverage": coverage and {**coverage._asdict(), "fraction": coverage.fraction},
    }
    return tokenizer, described


def summary(corpus: Corpus) -> str:
    """A short table: what each split holds, and what the tokenizer is."""
    lines = [
        f"{'split':10} {'documents':>10} {'tokens':>14} {'bytes':>14} {'words':>12} bytes/token"
    ]
    for split, store in corpus.splits.items():
        m = store.manifest
        lines.append(
            f"{split:10} {m['documents']:10,} {m['tokens']:14,} {m['bytes']:14,} "
            f"{m['words']:12,} {m['bytes'] / m['tokens']:11.3f}"
        )
    described = read_manifest(corpus.directory)["tokenizer"]
    line = f"tokenizer {described['name']}, {described['vocab_size']:,} ids"
    if coverage := described["coverage"]:
        line += f", trained on {coverage['fraction']:.1%} of the train text"
    return "\n".join([*lines, line])
