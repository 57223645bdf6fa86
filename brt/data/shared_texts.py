"""Refuses splits that have a text in common, which would make evaluation invalid."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from brt.data.store_writer import DIGESTS
from brt.data.token_store import TokenStore
from brt.errors import DataError


def refuse(partial: Path, stores: Mapping[str, Path]) -> None:
    """Raises DataError if a document of one split has the same text as a document of another.

    `stores` are two token stores by the name of the split, the first of which was written first;
    `partial` has their digests (see `brt.data.store_writer`).
    """
    (first, first_store), (second, second_store) = stores.items()
    earlier, later = (_digests(partial / split) for split in (first, second))
    candidates = np.flatnonzero(np.isin(_starts(later), _starts(earlier)))
    if not len(candidates):
        return
    places = {bytes(digest): i for i, digest in enumerate(earlier)}
    earlier_names, later_names = (
        TokenStore.open(store).names for store in (first_store, second_store)
    )
    for i in candidates:
        other = places.get(bytes(later[i]))
        if other is not None and not later_names[i].startswith("tfds:"):
            raise DataError(
                f"{later_names[i]} of {second} has the same text as {earlier_names[other]} of "
                f"{first}; take it out of one of them"
            )


def _digests(directory: Path) -> np.ndarray:
    """Returns the digests of a split, uint8 [documents, 32]."""
    return np.fromfile(directory / DIGESTS, np.uint8).reshape(-1, 32)


def _starts(digests: np.ndarray) -> np.ndarray:
    """Returns the first eight bytes of each digest as a number, uint64 [documents]."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]
