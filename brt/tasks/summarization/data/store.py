"""Stores of pairs: token ids of documents and summaries on disk, and the summaries as text.

A store is a directory with these files, which have a row for each pair:

    source.bin, target.bin   little-endian unsigned token ids of documents and summaries
    reference.bin            the summaries in UTF-8, as they were read
    rows.npz                 int64 arrays: the offsets of the rows in these files, and the number of
                             token ids of each document and summary before it was cut; and the names
                             of the pairs, as a JSON list in UTF-8
    manifest.json            written last: counts, the limits of the lengths, what was cut, hashes
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brt.data import manifests
from brt.data.rows import ragged, store
from brt.data.rows.ragged import Ragged
from brt.data.rows.store import RowStore
from brt.data.token_store import ids_dtype, stored_dtype
from brt.errors import DataError
from brt.tasks.summarization.data.columns import Pair
from brt.tasks.summarization.data.encoding import Encoder

TOGETHER = 64  # This number of pairs is tokenized in parallel.
TEXTS = ("source", "target", "reference")
_FACTS = {
    **dict.fromkeys(("pairs", "max_source_length", "max_target_length"), int),
    **dict.fromkeys(("vocab_size", "pad_id", "eos_id", "decoder_start_id"), int),
    "tokenizer": {"fingerprint": str}, "dtype": str,
}  # fmt: skip
UNCUT = ("source_uncut", "target_uncut")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairStore(RowStore):
    """Documents and summaries of a split as token ids, which are read from the disk."""

    source: Ragged  # token ids of each document, including special ids
    target: Ragged  # token ids of each summary, including special ids
    reference: Ragged  # UTF-8 bytes of each summary as it was read
    source_uncut: np.ndarray  # int64 [rows], number of token ids before a text was cut
    target_uncut: np.ndarray

    @classmethod
    def open(cls, directory: Path | str) -> "PairStore":
        with store.opened(directory, ["ids"], facts=_FACTS) as opened:
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
    def written_with(self) -> str:
        return self.manifest["tokenizer"]["fingerprint"]

    @property
    def lengths(self) -> np.ndarray:
        """Number of token ids of each document after it was cut, int64 [rows]."""
        return self.source.lengths

    @property
    def max_source_length(self) -> int:
        return self.manifest["max_source_length"]

    @property
    def max_target_length(self) -> int:
        return self.manifest["max_target_length"]

    def summary(self, row: int | np.integer) -> str:
        """Returns the text of a summary, as it was read and not cut."""
        return self.reference[row].tobytes().decode()


def write(
    directory: Path | str,
    pairs: Iterable[Pair],
    encoder: Encoder,
    *,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> PairStore:
    """Tokenizes pairs, writes them to a new store, and returns the opened store.

    If writing is interrupted, the directory has no manifest and cannot be opened. `facts` is called
    after the last pair, and returns further entries of the manifest. Raises DataError if there is
    no pair, or if a text is too long and `encoder.truncation` is "error".
    """
    directory = Path(directory)
    manifests.make_empty(directory)
    dtype = ids_dtype(encoder.tokenizer.vocab_size)
    columns = _write_texts(directory, pairs, encoder, dtype)
    if not columns["ids"]:
        raise DataError(f"there is no pair for {directory.name}")
    report = {name: _cuts(columns, name) for name in ("source", "target")}
    if encoder.truncation == "error":
        _refuse(directory.name, report, encoder)
    offsets = b"".join(columns[name].astype("<i8").tobytes() for name in ("source", "target"))
    described = {**_described(columns, encoder), "dtype": dtype.str, "cut": report, **facts()}
    store.finish(
        directory, columns, described, files=("source.bin", "target.bin"),
        identity=offsets + encoder.tokenizer.fingerprint.encode(),
    )  # fmt: skip
    return PairStore.open(directory)


def _write_texts(
    directory: Path, pairs: Iterable[Pair], encoder: Encoder, dtype: np.dtype
) -> dict[str, Any]:
    """Writes the three .bin files and returns the columns of rows.npz."""
    columns: dict[str, Any] = {name: [] for name in ("ids", *UNCUT)}
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(ragged.Writer(directory / f"{name}.bin", kind))
            for name, kind in zip(TEXTS, (dtype, dtype, np.dtype(np.uint8)), strict=True)
        }
        remaining = iter(pairs)
        while group := list(itertools.islice(remaining, TOGETHER)):
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
    """Counts the rows and tokens that were cut, of the documents or of the summaries."""
    uncut = columns[f"{name}_uncut"]
    cut = uncut - np.diff(columns[name])
    return {
        "rows": int((cut > 0).sum()),
        "tokens": int(cut.sum()),
        "of_tokens": int(uncut.sum()),
        "longest": int(uncut.max()),
    }


def _refuse(split: str, report: Mapping[str, Mapping[str, int]], encoder: Encoder) -> None:
    for name, limit in (
        ("source", encoder.max_source_length), ("target", encoder.max_target_length),
    ):  # fmt: skip
        if count := report[name]["rows"]:
            what = "documents" if name == "source" else "summaries"
            raise DataError(
                f"{count:,} {what} of {split} are longer than Pairs.max_{name}_length = {limit} "
                f"tokens, the longest has {report[name]['longest']:,}; raise the limit, or set "
                "Pairs.truncation = 'head' to cut them"
            )


def _described(columns: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    tokenizer = encoder.tokenizer
    special = ("vocab_size", "pad_id", "eos_id", "decoder_start_id")
    return {
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        **{name: getattr(tokenizer, name) for name in special},
        "max_source_length": encoder.max_source_length,
        "max_target_length": encoder.max_target_length,
        "pairs": len(columns["ids"]),
        "tokens": {name: int(columns[name][-1]) for name in ("source", "target")},
        "reference_bytes": int(columns["reference"][-1]),
    }
