"""Batches by step: a pass over all data is an epoch, and each has an order of its own.

Where a step lies is computed from seed and epoch, never searched by reading: any step costs the
same.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reader(abc.ABC):
    """`reader[step]` is the batch of that step, a pure function of the step and `identity`.

    A batch is a NamedTuple of NumPy arrays with the lanes on axis 0.

    Attributes:
      store: has a length, and a `fingerprint` that tells it from others.
      batch_size: rows in all, also where `lanes` asks for some of them.
      lanes: the rows to build, so that each process builds its own; None: all.
    """

    store: Any
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    lanes: Sequence[int] | None = None

    def __len__(self) -> int:
        """As good as endless."""
        return 1 << 62

    @abc.abstractmethod
    def __getitem__(self, step: int) -> Any: ...

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps that read all data once."""

    @abc.abstractmethod
    def largest(self) -> Any:
        """A batch of the largest shape."""

    @abc.abstractmethod
    def described(self, step: int) -> list[dict[str, Any]]:
        """What the rows of a step come from, JSON: of all lanes, those with padding left out."""

    @staticmethod
    @abc.abstractmethod
    def positions(batch: Any) -> int:
        """Tokens or frames that a step reads, padding included."""

    @abc.abstractmethod
    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What an epoch reads in an order of the store's rows."""

    def epoch(self, step: int) -> float:
        """How often all data have been read before `step`."""
        return step / self.steps_per_epoch

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides what a step reads, JSON; which rows a host builds does not."""
        names = ("batch_size", "seed", "shuffle")
        return {
            "store": self.store.fingerprint, **{name: getattr(self, name) for name in names}
        }  # fmt: skip

    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        cached = self.__dict__.get("_last_layout")
        if cached and cached[0] == epoch:
            return cached[1]
        order = np.arange(len(self.store))
        if self.shuffle:
            # Sorting raw bits: NumPy promises their stream, not that of its permutations.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed % 2**64, epoch]))
            order = np.argsort(bits.random_raw(len(order)), kind="stable")
        layout = self._laid_out(order)
        self.__dict__["_last_layout"] = epoch, layout  # one assignment: safe between threads
        return layout
