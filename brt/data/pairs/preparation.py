"""From `config.Pairs` to stores of pairs: once per content, in the cache.

A prepared corpus is a directory:

    train/ validation/ test/             stores of pairs (a split without sources is absent)
    tokenizer.model or tokenizer.json    the tokenizer
    corpus.json                          what it was made of; written last
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from brt import config
from brt.config.fields import cached_settings
from brt.data import manifests, preparation, sources, tokenizer_training
from brt.data.pairs import rows, store, tokenization
from brt.data.pairs import sources as pair_sources
from brt.data.pairs.columns import Columns, Pair
from brt.data.pairs.encoding import Encoder
from brt.data.pairs.sources import Tally
from brt.data.pairs.store import PairStore
from brt.data.pairs.tokenization import PairTokenizer
from brt.data.sources import FileHash
from brt.data.splits import SPLITS, split_named
from brt.errors import DataError

SKIP = "Pairs.errors = 'skip'"


class PairCorpus(NamedTuple):
    """Prepared pairs, opened."""

    directory: Path
    tokenizer: PairTokenizer
    splits: dict[str, PairStore]

    def split(self, name: str) -> PairStore:
        """The store of a split; raises DataError where there is none."""
        return split_named(self.splits, name, "pairs", "Pairs")


def prepare(pairs: config.Pairs, progress: bool = True) -> PairCorpus:
    """Opens the pairs that `pairs` describes; tokenizes them first where that was not done yet.

    The content of every file is hashed, so a changed file never meets a stale store.

    Args:
      progress: show what is done, and what was cut or left out, on stderr.

    Raises:
      DataError: a source cannot be read as asked.
    """
    hashes = {split: sources.hashes(getattr(pairs, split), rows.FORMATS) for split in SPLITS}
    preparation.refuse_shared(hashes, "Pairs")
    key = _key(pairs, hashes)
    directory = preparation.cache_directory(pairs) / key[:32]
    preparation.make(directory, key, lambda place: _build(pairs, place, key, hashes, progress))
    return open_corpus(directory)


def open_corpus(directory: Path) -> PairCorpus:
    """Opens a directory that `prepare` wrote.

    Raises:
      DataError: it is missing, unfinished or damaged.
    """
    manifest = preparation.read_manifest(directory)
    tokenizer = tokenization.load(str(directory / manifest["tokenizer"]["file"]))
    splits = {split: PairStore.open(directory / split) for split in manifest["splits"]}
    for split, opened in splits.items():
        if opened.manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            raise DataError(
                f"{directory / split} was written with another tokenizer than "
                f"{manifest['tokenizer']['file']}; delete {directory} and prepare it again"
            )
    return PairCorpus(directory, tokenizer, splits)


def _key(pairs: config.Pairs, hashes: Mapping[str, Sequence[FileHash]]) -> str:
    """sha256 of all that decides the content of the stores."""
    content = {
        "format": manifests.FORMAT,
        "kind": "pairs",
        "sources": {split: getattr(pairs, split) for split in SPLITS},
        "files": hashes,
        "settings": cached_settings(pairs),
    }
    if not _trained_size(pairs):
        content["tokenizer"] = tokenization.load(pairs.tokenizer).fingerprint
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _trained_size(pairs: config.Pairs) -> int | None:
    return tokenizer_training.vocabulary_size(pairs.tokenizer, "Pairs.tokenizer")


def _build(
    pairs: config.Pairs,
    directory: Path,
    key: str,
    hashes: Mapping[str, Sequence[FileHash]],
    progress: bool,
) -> None:
    tokenizer, file = _make_tokenizer(pairs, directory, progress)
    encoder = Encoder.of(pairs, tokenizer)
    splits = [split for split in SPLITS if getattr(pairs, split)]
    for split in splits:
        tally = Tally(split, SKIP)
        with _bar(f"preparing {split}", progress) as bar:
            found = _read(pairs, split, tally)
            opened = store.write(directory / split, _counted(found, bar), encoder)
        if tally.bad:
            preparation.say(tally.described(), progress)
        manifest = {**opened.manifest, "rows": tally.report()}
        manifests.write(directory / split / "manifest.json", manifest)
        preparation.say(f"prepared {split}: {described(opened)}", progress)
    manifest = {
        "key": key,
        "splits": splits,
        "tokenizer": {"file": file, "name": pairs.tokenizer, "fingerprint": tokenizer.fingerprint},
        "settings": cached_settings(pairs),
        "sources": {split: [file._asdict() for file in files] for split, files in hashes.items()},
    }
    manifests.write(directory / preparation.MANIFEST, manifest)


def _read(pairs: config.Pairs, split: str, tally: Tally) -> Iterator[Pair]:
    """The pairs of a split; with Pairs.errors = 'refuse', ends in DataError if a row was bad."""
    columns = Columns(pairs.source_field, pairs.target_field, pairs.id_field)
    yield from tally.usable(pair_sources.read(getattr(pairs, split), columns))
    if pairs.errors == "refuse":
        tally.refuse()
    if tally.bad == tally.rows:
        raise DataError(tally.described())


def _bar(text: str, progress: bool) -> tqdm:
    return tqdm(desc=text, unit=" pairs", disable=not (progress and sys.stderr.isatty()))


def _counted(pairs: Iterator[Pair], bar: tqdm) -> Iterator[Pair]:
    for pair in pairs:
        yield pair
        bar.update()


def _make_tokenizer(
    pairs: config.Pairs, directory: Path, progress: bool
) -> tuple[PairTokenizer, str]:
    """The tokenizer, and the name of its file in the directory; trained where asked."""
    size = _trained_size(pairs)
    if not size:
        tokenizer = tokenization.load(pairs.tokenizer)
        path = directory / f"tokenizer{Path(pairs.tokenizer).suffix}"
        path.write_bytes(tokenizer.content)
        return tokenizer, path.name
    preparation.say(f"training a tokenizer of {size} pieces", progress)
    path = directory / "tokenizer.model"
    found = _read(pairs, "train", Tally("train", SKIP))
    tokenizer_training.train_sentencepiece(
        ([text] for pair in found for text in (pair.source, pair.target)), size, path,
        seed=preparation.SEED, special=tokenizer_training.T5, setting="Pairs.tokenizer",
    )  # fmt: skip
    return tokenization.load(str(path)), path.name


def described(opened: PairStore) -> str:
    """A line: how many pairs and tokens, and how much of them was cut."""
    m = opened.manifest
    cuts = [
        f"cut {cut['rows']:,} {what} by {cut['tokens']:,} tokens "
        f"({cut['tokens'] / cut['of_tokens']:.1%} of all)"
        for what, cut in (("documents", m["cut"]["source"]), ("summaries", m["cut"]["target"]))
        if cut["rows"]
    ]
    counts = (
        f"{m['pairs']:,} pairs, {m['tokens']['source']:,} tokens of documents, "
        f"{m['tokens']['target']:,} of summaries"
    )
    return "; ".join([counts, *cuts])
