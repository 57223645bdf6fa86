"""Prepares token stores from the documents that the config section `Data` describes.

The result is a directory, in the cache or at a place that the user names (see `brt.data.cache`):

    train/ validation/ test/             token stores (a split without documents is absent)
    tokenizer.model or tokenizer.json    the tokenizer
    quarantine.jsonl                     documents that could not be read, if there are any
    corpus.json                          the manifest: sources and settings; written last

While the directory is written, its directory `partial` has the files of unfinished stores, from
which the next process continues if this one is killed.
"""

import json
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import config, durable, untrusted
from brt.data import (
    cache,
    losses,
    manifests,
    originals,
    quarantine,
    shared_texts,
    sources,
    store_writer,
    token_store,
    tokenizer_training,
    tokenizers,
)
from brt.data.cache import read_manifest
from brt.data.splits import SPLITS, Plan, fractions_of
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.errors import DataError
from brt.formatting import counted


class Dataset(NamedTuple):
    """Prepared documents that are opened for reading; `tokenizer` encoded them."""

    directory: Path
    tokenizer: Tokenizer
    splits: dict[str, TokenStore]

    def split(self, name: str) -> TokenStore:
        if name not in self.splits:
            raise DataError(
                f"{self.directory} has no {name} documents, only {', '.join(self.splits)}; "
                f"name some with Data.{name}"
            )
        return self.splits[name]

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns a JSON description of each split, by name; see `cache.describe_splits`."""
        return cache.describe_splits(self.directory, self.splits, "documents")


def prepare(data: config.Data, output: Path | str | None = None, progress: bool = True) -> Dataset:
    """Opens the documents that a config section describes; first tokenizes them if necessary.

    If `data.store` names a directory of prepared data, this directory is opened. `output` is the
    directory to write; None writes to the cache. A source that cannot be read, or an `output` with
    other content, raises DataError.
    """
    if data.store:
        return open_corpus(Path(data.store))
    hashes = {split: sources.hashes(getattr(data, split)) for split in SPLITS}
    cache.refuse_shared(hashes)
    loaded, more = None, {}
    if data.tokenizer.endswith((".model", ".json")):
        loaded = tokenizers.load(data.tokenizer)
        more["tokenizer"] = loaded.fingerprint

    def build(place: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
        plan = Plan(data)
        cache.print_unread_files(data, SPLITS, sources.left_out, progress)
        tokenizer, described = _make_tokenizer(data, plan, place, progress, loaded)
        written = _write(plan, plan.splits, tokenizer, place, facts, progress)
        return {**written, "tokenizer": described}

    directory = cache.prepared(data, hashes, build, output, **more)
    _say_quarantined(directory, progress)
    return open_corpus(directory)


def prepare_split(
    data: config.Data,
    split: str,
    tokenizer: Tokenizer,
    known: Path | None = None,
    progress: bool = True,
) -> Dataset:
    """Opens a single split of documents; first tokenizes the split if necessary.

    If `data.store` names prepared data, the result has all their splits. `tokenizer` encodes the
    split; it may be that of a trained model. `known` is as in `cache.prepared_split`.
    """
    if data.store:
        return open_corpus(Path(data.store))
    part = split in fractions_of(data)
    if not part and not getattr(data, split):
        raise DataError(f"there are no {split} documents; name some with Data.{split}")

    def build(place: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
        return _write(Plan(data, (split,)), (split,), tokenizer, place, facts, progress)

    directory = cache.prepared_split(
        data, split, part, known, sources.hashes, build, tokenizer=tokenizer.fingerprint
    )
    _say_quarantined(directory, progress)
    return Dataset(directory, tokenizer, {split: _opened(directory, split, tokenizer)})


def open_corpus(directory: Path) -> Dataset:
    """Opens all splits in a directory that `prepare` wrote; damage raises DataError."""
    manifest = read_manifest(directory)
    with manifests.explaining_damage(directory, "corpus"):
        tokenizer = _load_tokenizer(directory, manifest["tokenizer"])
    splits = {split: _opened(directory, split, tokenizer) for split in manifest["splits"]}
    return Dataset(directory, tokenizer, splits)


def _load_tokenizer(directory: Path, described: Mapping[str, Any]) -> Tokenizer:
    name = "bytes" if described["name"] == "bytes" else str(directory / described["file"])
    return tokenizers.load(name)


def _opened(directory: Path, split: str, tokenizer: Tokenizer) -> TokenStore:
    store = TokenStore.open(directory / split)
    if store.manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        raise DataError(
            f"{directory / split} was written with another tokenizer than {tokenizer.name}; "
            f"prepare {directory} again"
        )
    return store.counted(tokenizer)


def _write(
    plan: Plan,
    splits: Iterable[str],
    tokenizer: Tokenizer,
    directory: Path,
    facts: Mapping[str, Any],
    progress: bool,
) -> dict[str, Any]:
    """Writes the stores of some splits, and returns the manifest's entries about the splits."""
    splits = tuple(splits)
    partial = directory / "partial"
    for i, split in enumerate(splits):
        origin = f" ({plan.held_out[split]})" if split in plan.held_out else ""
        store = _write_split(plan, split, tokenizer, directory, facts, progress)
        for other in splits[:i]:
            shared_texts.refuse(partial, {other: directory / other, split: store.directory})
        counts = store.manifest
        cache.say(
            f"prepared {split}{origin}: {counted(counts['documents'], 'document')}, "
            f"{counts['bytes']:,} bytes, {counts['tokens']:,} tokens"
            + "".join(f"; {clause}" for clause in [_lost(store)] if clause),
            progress and not sys.stderr.isatty(),
        )
    held_out = {split: plan.held_out[split] for split in splits if split in plan.held_out}
    plan.bad.write(directory)
    shutil.rmtree(partial)
    return {"splits": list(splits), "held_out": held_out, "quarantined": len(plan.bad)}


def _write_split(
    plan: Plan,
    split: str,
    tokenizer: Tokenizer,
    directory: Path,
    facts: Mapping[str, Any],
    progress: bool,
) -> TokenStore:
    """Writes the store of a split; uses what an interrupted process has written of it."""
    if (directory / split / "manifest.json").exists():
        if plan.bad.most:  # Reading the documents again finds those that cannot be read.
            deque(plan.documents(split), maxlen=0)
        return TokenStore.open(directory / split)
    shutil.rmtree(directory / split, ignore_errors=True)
    partial = directory / "partial" / split
    if done := store_writer.committed(partial):
        cache.say(
            f"continuing with {split}: {counted(done.documents, 'document')} "
            f"({done.bytes:,} bytes) are prepared",
            progress,
        )
    size = sum(file["bytes"] for file in facts["sources"].get(split, ())) or None
    with cache.bar(split, progress, total=size, unit="B", unit_scale=True) as bar:
        return token_store.write(
            directory / split, plan.documents(split), tokenizer, settings=facts,
            progress=bar.update, partial=partial,
        )  # fmt: skip


def _lost(store: TokenStore) -> str:
    """Returns a clause about the bytes of a split that the tokenizer loses; "" for none."""
    unknown = store.manifest.get("unknown_tokens", 0)
    return losses.loss_message(store.lost_bytes, int(store.bytes.sum()), unknown)


def _say_quarantined(directory: Path, progress: bool) -> None:
    if count := read_manifest(directory).get("quarantined"):
        phrase = "1 document is" if count == 1 else f"{count:,} documents are"
        where = directory / quarantine.NAME
        cache.say(f"{phrase} left out because of errors: {where}", progress)


def _make_tokenizer(
    data: config.Data, plan: Plan, directory: Path, progress: bool, loaded: Tokenizer | None
) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns the tokenizer and its description, and stores it; trains it if `loaded` is None."""
    # If an interrupted process has stored the tokenizer, it is only loaded.
    known = directory / "partial" / "tokenizer.json"
    if known.exists():
        described = untrusted.read_json(known, {"file": str, "name": str})
        of_bytes = described["name"] == "bytes"
        return tokenizers.load(
            "bytes" if of_bytes else str(directory / described["file"])
        ), described
    tokenizer, described = _new_tokenizer(data, plan, directory, progress, loaded)
    known.parent.mkdir(exist_ok=True)
    durable.write(known, json.dumps(described).encode())
    return tokenizer, described


def _new_tokenizer(
    data: config.Data, plan: Plan, directory: Path, progress: bool, loaded: Tokenizer | None
) -> tuple[Tokenizer, dict[str, Any]]:
    """Trains or loads the tokenizer, stores it in the directory, and describes it."""
    coverage = None
    path = directory / "tokenizer.model"
    if size := tokenizer_training.vocabulary_size(data.tokenizer):
        cache.say(f"training a tokenizer of {size} pieces", progress)
        texts = (document.chunks for document in plan.documents("train"))
        coverage = tokenizer_training.train_sentencepiece(texts, size, path, seed=cache.SEED)
        tokenizer = tokenizers.load(str(path))
    else:
        tokenizer = loaded or tokenizers.load(data.tokenizer)
        if tokenizer.name == "bytes":
            path = directory / "tokenizer.json"
            path.write_text(json.dumps({"name": tokenizer.name}) + "\n")
        else:
            path = directory / tokenizer.file[0]
            for name, content in originals.stored(tokenizer.file, tokenizer.beside).items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                durable.write(directory / name, content, below=directory)
    described = {
        "file": path.name,
        "name": data.tokenizer,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "coverage": coverage and {**coverage._asdict(), "fraction": coverage.fraction},
    }
    return tokenizer, described


def summary(dataset: Dataset) -> str:
    """Returns a table of the splits, and lines about the tokenizer and the bytes that it loses."""
    lines = [
        f"{'split':10} {'documents':>10} {'tokens':>14} {'bytes':>14} {'words':>12} bytes/token"
    ]
    for split, store in dataset.splits.items():
        m = store.manifest
        lines.append(
            f"{split:10} {m['documents']:10,} {m['tokens']:14,} {m['bytes']:14,} "
            f"{m['words']:12,} {m['bytes'] / m['tokens']:11.3f}"
        )
    described = read_manifest(dataset.directory)["tokenizer"]
    line = f"tokenizer {described['name']}, {dataset.tokenizer.vocab_size:,} ids"
    if coverage := described.get("coverage"):
        line += f", trained on {coverage['fraction']:.1%} of the train text"
    lost = [f"{split}: {clause}" for split, s in dataset.splits.items() if (clause := _lost(s))]
    return "\n".join([*lines, line, *lost])
