"""A curriculum: training begins with easy documents, and harder documents are added later."""

import dataclasses
import functools
from typing import Any

from brt import config
from brt.data.lanes import LaneReader
from brt.data.token_store import TokenStore
from brt.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedReader(LaneReader):
    """Reader of training documents in lanes, for which more and more documents become available.

    Each stage of the curriculum reads the documents of the stage before and further documents, in
    the order of the token store. At the beginning of a stage, each lane (row of the batch) starts
    without state, as at the beginning of a run.
    """

    # For each stage its first step, which ascend from 0, and the number of documents that it reads.
    stages: tuple[tuple[int, int], ...]

    def __getitem__(self, step: int) -> Batch:
        begin, reader = next(stage for stage in reversed(self._readers) if stage[0] <= step)
        return reader[step - begin]

    @functools.cached_property
    def _readers(self) -> list[tuple[int, LaneReader]]:
        names = [field.name for field in dataclasses.fields(LaneReader)]
        common = {name: getattr(self, name) for name in names}
        return [
            (step, LaneReader(**{**common, "store": _first(self.store, documents)}))
            for step, documents in self.stages
        ]

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "stages": [list(stage) for stage in self.stages]}


def reader(data: config.Data, store: TokenStore, **sizes: int) -> LaneReader:
    """Returns the reader of the training documents, with stages if `data` has a curriculum."""
    common: dict[str, Any] = {"store": store, **sizes}
    if not data.curriculum:
        return LaneReader(**common)
    steps = (0, *data.curriculum)
    # Stage n (from 0) reads the documents of the first n + 1 sources in `data.train`.
    counts = [_of_first(data.train[: n + 1], store) for n in range(len(steps))]
    return StagedReader(**common, stages=tuple(zip(steps, counts, strict=True)))


def _of_first(names: tuple[str, ...], store: TokenStore) -> int:
    prefixes = tuple(f"{name}#" for name in names)
    return sum(name.startswith(prefixes) for name in store.names)


def _first(store: TokenStore, documents: int) -> TokenStore:
    names = ["bytes", "characters", "words"] + ["lost"] * (store.lost is not None)
    cut = {name: getattr(store, name)[:documents] for name in names}
    return dataclasses.replace(
        store, offsets=store.offsets[: documents + 1], names=store.names[:documents], **cut
    )
