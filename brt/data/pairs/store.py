"""The pairs of a split on disk: ids of documents and summaries, and the summaries as text.

A store is a directory:

    source.bin, target.bin   little-endian unsigned ids, rows one after another
    reference.bin            the summaries in UTF-8, as they were read
    rows.npz                 where each row begins in those, ids that it had before it was
                             cut, and its name: int64 arrays and a JSON list in UTF-8
    manifest.json            written last: what the store was made of, what was cut, hashes
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brt.data import manifests, sources
from brt.data.pairs import ragged
from brt.data.pairs.columns import Pair
from brt.data.pairs.encoding import Encoder
from brt.data.pairs.ragged import Ragged
from brt.data.token_store import ids_dtype
from brt.errors import DataError

TOGETHER = 64  # pairs that are tokenized in parallel
TEXTS = ("source", "target", "reference")
UNCUT = ("source_uncut", "target_uncut")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairStore:
    """Documents and summaries as ids.

    Attributes:
      source: ids of each document, ended, no longer than `max_source_length`.
      target: ids of each summary, ended, no longer than `max_target_length`.
      reference: UTF-8 of each summary.
      source_uncut: int64 [rows], ids that each document has in full; target_uncut the same.
      ids: [rows], what predictions are called.
    """

    directory: Path
    manifest: Mapping[str, Any]
    source: Ragged
    target: Ragged
    reference: Ragged
    source_uncut: np.ndarray
    target_uncut: np.ndarray
    ids: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path | str) -> "PairStore":
        """Opens a finished store.

        Raises:
          DataError: it is missing, unfinished, of another format, or its sizes do not fit.
        """
        directory = Path(directory)
        manifest = manifests.read(directory / "manifest.json")
        dtypes = {name: np.dtype(manifest["dtype"]) for name in TEXTS} | {"reference": np.uint8}
        try:
            with np.load(directory / "rows.npz", allow_pickle=False) as arrays:
                texts = {
                    name: ragged.read(directory / f"{name}.bin", np.dtype(dtype), arrays[name])
                    for name, dtype in dtypes.items()
                }
                uncut = {name: arrays[name] for name in UNCUT}
                ids = tuple(json.loads(arrays["ids"].tobytes()))
            if {manifest["pairs"]} != {len(ids), *map(len, texts.values())}:
                raise ValueError("rows.npz has another length than its manifest says")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"the store {directory} is damaged ({error}); delete it and prepare it again"
            ) from error
        return cls(directory=directory, manifest=manifest, ids=ids, **texts, **uncut)

    def __len__(self) -> int:
        """How many pairs."""
        return len(self.ids)

    @property
    def fingerprint(self) -> str:
        """sha256 of the ids of documents and summaries, and of the tokenizer."""
        return self.manifest["fingerprint"]

    @property
    def max_source_length(self) -> int:
        return self.manifest["max_source_length"]

    @property
    def max_target_length(self) -> int:
        return self.manifest["max_target_length"]

    def summary(self, row: int | np.integer) -> str:
        """The text of a summary, uncut."""
        return self.reference[row].tobytes().decode()


def write(
    directory: Path | str,
    pairs: Iterable[Pair],
    encoder: Encoder,
    *,
    settings: Mapping[str, Any] | None = None,
) -> PairStore:
    """Tokenizes pairs into a new store.

    Args:
      settings: what the manifest keeps beside the counts.

    Raises:
      DataError: there is no pair; one is too long and truncation is "error"; `directory` is in
        use.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise DataError(f"{directory} is not empty; name another directory")
    with manifests.atomic_directory(directory) as temporary:
        dtype = ids_dtype(encoder.tokenizer.vocab_size)
        rows = _write_texts(temporary, pairs, encoder, dtype)
        if not rows["ids"]:
            raise DataError(f"there is no pair for {directory.name}")
        report = {name: _cuts(rows, name) for name in ("source", "target")}
        if encoder.truncation == "error":
            _refuse(directory.name, report, encoder)
        encoded = np.frombuffer(json.dumps(rows.pop("ids")).encode(), np.uint8)
        np.savez(temporary / "rows.npz", ids=encoded, **{k: np.array(v) for k, v in rows.items()})
        manifest = _manifest(temporary, rows, report, encoder, dtype)
        manifests.write(temporary / "manifest.json", {**manifest, **(settings or {})})
    return PairStore.open(directory)


def _write_texts(
    directory: Path, pairs: Iterable[Pair], encoder: Encoder, dtype: np.dtype
) -> dict[str, Any]:
    """Writes the three .bin files; the columns of rows.npz."""
    columns: dict[str, Any] = {name: [] for name in ("ids", *UNCUT)}
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(ragged.Writer(directory / f"{name}.bin", kind))
            for name, kind in zip(TEXTS, (dtype, dtype, np.dtype(np.uint8)), strict=True)
        }
        for group in _groups(pairs):
            sources = encoder.sources([pair.source for pair in group])
            targets = encoder.targets([pair.target for pair in group])
            for name, found in (("source", sources), ("target", targets)):
                writers[name].extend(encoded.ids for encoded in found)
                columns[f"{name}_uncut"] += [encoded.uncut for encoded in found]
            texts = (pair.target.encode() for pair in group)
            writers["reference"].extend(np.frombuffer(text, np.uint8) for text in texts)
            columns["ids"] += [pair.id for pair in group]
    return columns | {name: writer.offsets for name, writer in writers.items()}


def _groups(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    remaining = iter(pairs)
    while group := list(itertools.islice(remaining, TOGETHER)):
        yield group


def _cuts(rows: Mapping[str, Any], name: str) -> dict[str, int]:
    """How much was cut of the documents or summaries."""
    uncut = np.array(rows[f"{name}_uncut"], np.int64)
    cut = uncut - np.diff(rows[name])
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
        if found := report[name]["rows"]:
            what = "documents" if name == "source" else "summaries"
            raise DataError(
                f"{found:,} {what} of {split} are longer than Pairs.max_{name}_length = {limit} "
                f"tokens, the longest has {report[name]['longest']:,}; raise it, or let them be "
                "cut with Pairs.truncation = 'head'"
            )


def _manifest(
    directory: Path,
    rows: Mapping[str, Any],
    report: Mapping[str, Mapping[str, int]],
    encoder: Encoder,
    dtype: np.dtype,
) -> dict[str, Any]:
    files = [f"{name}.bin" for name in TEXTS] + ["rows.npz"]
    hashes = {name: sources.sha256(directory / name) for name in files}
    identity = "".join(hashes[f"{name}.bin"] for name in ("source", "target")).encode()
    identity += b"".join(rows[name].astype("<i8").tobytes() for name in ("source", "target"))
    tokenizer = encoder.tokenizer
    identity += tokenizer.fingerprint.encode()
    special = ("vocab_size", "pad_id", "eos_id", "decoder_start_id")
    return {
        "fingerprint": hashlib.sha256(identity).hexdigest(),
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        **{name: getattr(tokenizer, name) for name in special},
        "max_source_length": encoder.max_source_length,
        "max_target_length": encoder.max_target_length,
        "dtype": dtype.str,
        "pairs": len(rows["source"]) - 1,
        "tokens": {name: int(rows[name][-1]) for name in ("source", "target")},
        "reference_bytes": int(rows["reference"][-1]),
        "cut": report,
        "sha256": hashes,
    }
