"""From `config.Data` to token stores: once per content, in a cache or where the user says.

A prepared corpus is a directory (see `brt.data.cache`):

    train/ validation/ test/             token stores (a split without documents is absent)
    tokenizer.model or tokenizer.json    the tokenizer
    corpus.json                          what it was made of; written last
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import config
from brt.data import cache, sources, token_store, tokenizer_training, tokenizers
from brt.data.cache import Hashes, read_manifest
from brt.data.splits import SPLITS, Plan
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.errors import DataError


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

    Args:
      output: where to write; None: in the cache.
      progress: show a bar on a terminal, else a line per split.

    Raises:
      DataError: a source cannot be read as asked, or `output` holds something else.
    """
    if data.store:
        return open_corpus(Path(data.store))
    hashes = {split: sources.hashes(getattr(data, split)) for split in SPLITS}
    cache.refuse_shared(hashes, "Data")
    more = {}
    if data.tokenizer.endswith((".model", ".json")):
        more["tokenizer"] = tokenizers.load(data.tokenizer).fingerprint
    return open_corpus(
        cache.prepared(
            data,
            hashes,
            lambda place, facts: _build(data, place, hashes, facts, progress),
            output,
            **more,
        )  # fmt: skip
    )


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


def _build(
    data: config.Data, directory: Path, hashes: Hashes, facts: Mapping[str, Any], progress: bool
) -> dict[str, Any]:
    plan = Plan(data)
    tokenizer, described = _make_tokenizer(data, plan, directory, progress)
    for split in plan.splits:
        found = plan.documents(split)
        size = sum(file.bytes for file in hashes[split]) or None
        with cache.bar(split, progress, total=size, unit="B", unit_scale=True) as bar:
            store = token_store.write(
                directory / split, found, tokenizer, settings=facts, progress=bar.update
            )
        counts = store.manifest
        cache.say(
            f"prepared {split}: {counts['documents']:,} documents, {counts['bytes']:,} bytes, "
            f"{counts['tokens']:,} tokens",
            progress and not sys.stderr.isatty(),
        )
    return {"splits": list(plan.splits), "tokenizer": described}


def _make_tokenizer(
    data: config.Data, plan: Plan, directory: Path, progress: bool
) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, stored in the directory; trained on the train split where asked."""
    coverage = None
    path = directory / "tokenizer.model"
    if size := tokenizer_training.vocabulary_size(data.tokenizer):
        cache.say(f"training a tokenizer of {size} pieces", progress)
        texts = (document.chunks for document in plan.documents("train"))
        coverage = tokenizer_training.train_sentencepiece(texts, size, path, seed=cache.SEED)
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
