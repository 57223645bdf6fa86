"""A split on disk: named arrays and lists of texts.

rows.npz        the arrays; the lists as JSON in UTF-8
manifest.json   written last: what the split was made of, counts, hashes
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brt.data import manifests, sources
from brt.data.pairs.ragged import Ragged
from brt.errors import DataError
from brt.types import TextBatch


class Split(NamedTuple):
    """What a directory holds.

    Attributes:
      manifest: with `fingerprint`, sha256 of everything below.
    """

    manifest: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    texts: Mapping[str, list[Any]]

    def ragged(self, name: str) -> Ragged:
        """Rows that `flat` made arrays of."""
        return Ragged(self.arrays[name], self.arrays[f"{name}_offsets"])


def flat(name: str, rows: Sequence[np.ndarray], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Rows of different lengths as two arrays."""
    sizes = np.array([len(row) for row in rows], np.int64)
    empty = np.zeros((0, *rows[0].shape[1:]) if rows else 0, dtype)
    return {
        name: np.concatenate([empty, *rows]).astype(dtype),
        f"{name}_offsets": np.r_[0, np.cumsum(sizes)].astype(np.int64),
    }


def padded(
    rows: np.ndarray, length: int, tokens: Callable[[int], np.ndarray], targets: np.ndarray
) -> TextBatch:
    """A batch; rows of -1 are empty.

    Args:
      tokens: of a row.
      targets: of all rows of the split, [rows, parts] (int32).
    """
    there = np.asarray(rows, np.int32)
    ids = np.zeros((len(there), length), np.int32)
    valid = np.zeros(ids.shape, bool)
    for i in np.flatnonzero(there >= 0):
        found = tokens(there[i])
        ids[i, : len(found)], valid[i, : len(found)] = found, True
    scored = np.repeat(there[:, None] >= 0, targets.shape[1], axis=1)
    return TextBatch(ids, valid, np.where(scored, targets[there], 0), scored, there)


def write(
    directory: Path,
    arrays: Mapping[str, np.ndarray],
    texts: Mapping[str, Sequence[Any]],
    facts: Mapping[str, Any],
) -> None:
    """Fills a directory that exists.

    Args:
      texts: lists that JSON has.
      facts: for the manifest.
    """
    listed = {
        name: np.frombuffer(json.dumps(list(rows)).encode(), np.uint8)
        for name, rows in texts.items()
    }
    digest = hashlib.sha256()
    for name, array in sorted({**arrays, **listed}.items()):
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    np.savez(directory / "rows.npz", **arrays, **listed)
    manifest = {
        "fingerprint": digest.hexdigest(),
        "texts": list(texts),
        **facts,
        "sha256": {"rows.npz": sources.sha256(directory / "rows.npz")},
    }
    manifests.write(directory / "manifest.json", manifest)


def read(directory: Path) -> Split:
    """Opens what `write` wrote.

    Raises:
      DataError: it is missing, unfinished, damaged or of another format.
    """
    manifest = manifests.read(directory / "manifest.json")
    try:
        with np.load(directory / "rows.npz", allow_pickle=False) as file:
            listed = {name: json.loads(file[name].tobytes()) for name in manifest["texts"]}
            arrays = {name: file[name] for name in file.files if name not in listed}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the store {directory} is damaged ({error}); delete it and prepare it again"
        ) from error
    return Split(manifest, arrays, listed)
