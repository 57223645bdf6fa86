"""Prepares pairs of document and summary, which the config section Pairs names.

The pairs are read from files, encoded as token ids, and written to a directory of the cache, which
has a store (`PairStore`) for each split. Batches consist of pairs of similar length, padded to one
of a few lengths.

A store is a directory with these files, which have a row for each pair:

    source.bin, target.bin   little-endian unsigned token ids of documents and summaries
    reference.bin            the summaries in UTF-8, as they were read
    rows.npz                 int64 arrays: the offsets of the rows in the .bin files, and the number
                             of token ids of each document and summary before it was cut; and the
                             names of the pairs, as a JSON list in UTF-8
    manifest.json            written last: counts, the limits of the lengths, what was cut, hashes
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brt import config
from brt.config.checks import column
from brt.data import manifests, stores, tables, tokenizer_training
from brt.data.preparation import Corpus, RowPreparation, TokenizedPreparation, in_groups
from brt.data.quarantine import BadRow, Tally
from brt.data.readers import RowReader, padded
from brt.data.stores import Ragged, RowStore
from brt.data.token_store import ids_dtype, stored_dtype
from brt.errors import ConfigError, DataError
from brt.tasks.summarization import columns, tokenization
from brt.tasks.summarization.columns import Columns, Pair
from brt.tasks.summarization.tokenization import PairTokenizer
from brt.types import PairBatch

TEXTS = ("source", "target", "reference")
_FACTS = {
    **dict.fromkeys(("pairs", "max_source_length", "max_target_length"), int),
    **dict.fromkeys(("vocab_size", "pad_id", "eos_id", "decoder_start_id"), int),
    "tokenizer": {"fingerprint": str}, "dtype": str,
}  # fmt: skip
UNCUT = ("source_uncut", "target_uncut")


class Encoded(NamedTuple):
    """The token ids of a text, including the tokenizer's start and end ids."""

    ids: np.ndarray  # int32 [T], after the text was cut
    uncut: int  # number of ids before the text was cut


class Encoder:
    """Encodes documents and summaries as token ids, according to the config section Pairs.

    Long texts lose their ends, but the special ids at start and end remain.
    """

    def __init__(self, pairs: config.Pairs, tokenizer: PairTokenizer):
        self.pairs, self.tokenizer = pairs, tokenizer

    def sources(self, documents: Sequence[str]) -> list[Encoded]:
        """Returns the token ids of documents, each with Pairs.prefix before it.

        Prefix and document are cut together to Pairs.max_source_length ids.
        """
        texts = [self.pairs.prefix + document for document in documents]
        limit = self.pairs.max_source_length
        return [self._wrap(ids, limit) for ids in self.tokenizer.encode(texts)]

    def targets(self, summaries: Sequence[str]) -> list[Encoded]:
        limit = self.pairs.max_target_length
        return [self._wrap(ids, limit) for ids in self.tokenizer.encode(summaries)]

    def _wrap(self, ids: np.ndarray, limit: int) -> Encoded:
        begin, end = self.tokenizer.begin, self.tokenizer.eos_id
        special = len(begin) + 1
        wrapped = np.concatenate([begin, ids[: limit - special], [end]]).astype(np.int32)
        return Encoded(wrapped, len(ids) + special)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairStore(RowStore):
    """Documents and summaries of a split as token ids, which are read from the disk."""

    source: Ragged  # token ids of each document, including special ids
    target: Ragged  # token ids of each summary, including special ids
    reference: Ragged  # UTF-8 bytes of each summary as it was read
    source_uncut: np.ndarray  # int64 [rows], number of ids of each document before it was cut
    target_uncut: np.ndarray  # int64 [rows], number of ids of each summary before it was cut

    @classmethod
    def open(cls, directory: Path | str) -> "PairStore":
        with stores.opened(directory, facts=_FACTS) as opened:
            dtypes = dict.fromkeys(TEXTS, stored_dtype(opened.manifest))
            dtypes["reference"] = np.dtype(np.uint8)
            texts = {
                name: opened.on_disk(f"{name}.bin", dtype, opened.columns[name], "pairs")
                for name, dtype in dtypes.items()
            }
            opened.check("pairs", *(opened.columns[name] for name in ("ids", *UNCUT)))
            for name in ("source", "target"):
                if texts[name].lengths.max() > opened.manifest[limit := f"max_{name}_length"]:
                    raise ValueError(f"{name}.bin has rows longer than {limit}")
            columns = {name: opened.columns[name] for name in ("ids", *UNCUT)}
        return cls(directory=opened.directory, manifest=opened.manifest, **columns, **texts)

    @property
    def lengths(self) -> np.ndarray:
        """Number of token ids of each document after it was cut, int64 [rows]."""
        return self.source.lengths

    def summary(self, row: int | np.integer) -> str:
        """Returns the text of a summary, as it was read and not cut."""
        return self.reference[row].tobytes().decode()


def write_pairs(
    directory: Path | str,
    pairs: Iterable[Pair],
    encoder: Encoder,
    *,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> PairStore:
    """Tokenizes pairs, writes them to a new store, and returns the opened store.

    If writing is interrupted, the directory has no manifest and cannot be opened. `facts` is called
    after the last pair, and returns further entries of the manifest. Raises DataError if there is
    no pair.
    """
    directory = Path(directory)
    manifests.make_empty(directory)
    dtype = ids_dtype(encoder.tokenizer.vocab_size)
    columns = _write_texts(directory, pairs, encoder, dtype)
    if not columns["ids"]:
        raise DataError(f"there is no pair for {directory.name}")
    section, tokenizer = encoder.pairs, encoder.tokenizer
    report = {name: _cuts(columns, name) for name in ("source", "target")}
    offsets = b"".join(columns[name].astype("<i8").tobytes() for name in ("source", "target"))
    special = ("vocab_size", "pad_id", "eos_id", "decoder_start_id")
    described = {
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        **{name: getattr(tokenizer, name) for name in special},
        "max_source_length": section.max_source_length,
        "max_target_length": section.max_target_length,
        "pairs": len(columns["ids"]),
        "tokens": {name: int(columns[name][-1]) for name in ("source", "target")},
        "reference_bytes": int(columns["reference"][-1]),
        "dtype": dtype.str,
        "cut": report,
    }
    stores.finish(
        directory, columns, {**described, **facts()}, files=("source.bin", "target.bin"),
        identity=offsets + tokenizer.fingerprint.encode(),
    )  # fmt: skip
    return PairStore.open(directory)


def _write_texts(
    directory: Path, pairs: Iterable[Pair], encoder: Encoder, dtype: np.dtype
) -> dict[str, Any]:
    """Writes the three .bin files and returns the columns of rows.npz."""
    columns: dict[str, Any] = {name: [] for name in ("ids", *UNCUT)}
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(stores.RaggedWriter(directory / f"{name}.bin", kind))
            for name, kind in zip(TEXTS, (dtype, dtype, np.dtype(np.uint8)), strict=True)
        }
        for group in in_groups(pairs):
            sources = encoder.sources([pair.source for pair in group])
            targets = encoder.targets([pair.target for pair in group])
            for name, texts in (("source", sources), ("target", targets)):
                writers[name].extend(encoded.ids for encoded in texts)
                columns[f"{name}_uncut"] += [encoded.uncut for encoded in texts]
            references = (pair.target.encode() for pair in group)
            writers["reference"].extend(np.frombuffer(text, np.uint8) for text in references)
            columns["ids"] += [pair.id for pair in group]
    columns |= {name: np.array(columns[name], np.int64) for name in UNCUT}
    return columns | {name: writer.offsets for name, writer in writers.items()}


def _cuts(columns: Mapping[str, Any], name: str) -> dict[str, int]:
    """Returns the numbers of cut rows and of cut tokens, and two numbers from before the cut: all
    tokens, and the tokens of the longest row. `name` is "source" or "target".
    """
    uncut = columns[f"{name}_uncut"]
    cut = uncut - np.diff(columns[name])
    return {
        "rows": int((cut > 0).sum()),
        "tokens": int(cut.sum()),
        "of_tokens": int(uncut.sum()),
        "longest": int(uncut.max()),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairReader(RowReader):
    """Reader of pairs whose documents have similar lengths, so that little padding is needed.

    `buckets` are the lengths to which documents are padded, in ascending order. The last bucket is
    the store's `max_source_length`. Without buckets, all documents are padded to this length.
    """

    store: PairStore

    def __post_init__(self) -> None:
        if self.buckets and self.buckets[-1] != self.longest:
            raise ConfigError(
                f"the last of Data.buckets = {self.buckets} must be the length that documents "
                f"were cut to, {self.longest}"
            )

    @property
    def longest(self) -> int:
        return self.store.manifest["max_source_length"]

    def gather(self, rows: np.ndarray, length: int) -> PairBatch:
        """Summaries are padded to the store's `max_target_length`."""
        store, manifest = self.store, self.store.manifest
        pad, longest = manifest["pad_id"], manifest["max_target_length"]
        source, mask = padded(rows, store.source.__getitem__, length, np.int32, fill=pad)
        target, scored = padded(rows, store.target.__getitem__, longest, np.int32, fill=pad)
        starts = np.full((len(rows), 1), manifest["decoder_start_id"], np.int32)
        return PairBatch(
            source=source,
            source_mask=mask,
            target_in=np.concatenate([starts, target[:, :-1]], axis=1),
            target_out=target,
            scored=scored,
            row=np.asarray(rows, np.int32),
        )

    @staticmethod
    def positions(batch: PairBatch) -> int:
        return batch.source.size + batch.target_in.size


class PairDataset(Corpus[PairTokenizer, PairStore]):
    """Prepared pairs of document and summary that are opened for reading."""

    rows = "pairs"


class PairPreparation(TokenizedPreparation, RowPreparation):
    """Prepares and opens the pairs that a config section describes."""

    dataset, store, kind, endings = PairDataset, PairStore, "pairs", tables.FORMATS
    special = tokenizer_training.T5

    @staticmethod
    def load(name: str) -> PairTokenizer:
        return tokenization.load(name)

    def texts(self) -> Iterator[list[str]]:
        for pair in self.usable("train"):
            yield from ([pair.source], [pair.target])

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        encoder = Encoder(self.section, self.tokenizer)
        pairs = self.usable(split, tally)
        written = write_pairs(directory, pairs, encoder, facts=lambda: {"rows": tally.report()})
        m = written.manifest
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

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Pair | BadRow]:
        chosen = (column(self.section, role) for role in ("source", "target", "id"))
        return columns.read(names, Columns(*chosen))

    def content(self, row: Pair) -> str:
        """Returns the document, so that all pairs with the same document are in one split."""
        return row.source
