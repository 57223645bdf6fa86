"""Harder documents join easier ones after so many steps."""

import dataclasses
import functools
from typing import Any

from brt import config
from brt.data.lanes import LaneReader
from brt.data.token_store import TokenStore
from brt.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedReader(LaneReader):
    """Lanes that read more and more of a store: from each of its steps on, its first documents.

    Every stage begins with whole documents in all lanes, as a run does.

    Attributes:
      stages: (step, documents), from step 0, ascending.
    """

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
    """Lanes of the training documents, in the order that `data` asks for.

    Args:
      sizes: of `LaneReader`.
    """
    common: dict[str, Any] = {"store": store, **sizes}
    if not data.curriculum:
        return LaneReader(**common)
    steps = (0, *data.curriculum)
    counts = [_of_first(data.train[: n + 1], store) for n in range(len(steps))]
    return StagedReader(**common, stages=tuple(zip(steps, counts, strict=True)))


def _of_first(names: tuple[str, ...], store: TokenStore) -> int:
    """How many documents are of these sources, which the store has first."""
    prefixes = tuple(f"{name}#" for name in names)
    return sum(name.startswith(prefixes) for name in store.names)


def _first(store: TokenStore, documents: int) -> TokenStore:
    """A store of its first documents."""
    names = ["bytes", "characters", "words"] + ["lost"] * (store.lost is not None)
    cut = {name: getattr(store, name)[:documents] for name in names}
    return dataclasses.replace(
        store, offsets=store.offsets[: documents + 1], names=store.names[:documents], **cut
    )
