"""The base class of readers, which return the batch of any training step.

An epoch is one pass over all data, in an order that the seed and the number of the epoch determine.
The content of a step is computed from them, so a resumed run continues anywhere without reading
the steps before.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reader(abc.ABC):
    """Base class of readers: `reader[step]` is the batch of a step.

    The batch depends only on the step and on what `identity` contains. It is a NamedTuple of NumPy
    arrays whose axis 0 is the lanes, the rows of the batch.

    Attributes:
      store: the data; it has a length, and a `fingerprint` of its content.
      batch_size: the number of rows of a batch, over all processes.
      seed: determines the order of each epoch.
      shuffle: False reads every epoch in the order of the store, as evaluation does.
      lanes: the rows that this process builds; None builds all.
    """

    store: Any
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    lanes: Sequence[int] | None = None

    def __len__(self) -> int:
        """Returns a huge number: steps have no end."""
        return 1 << 62

    @abc.abstractmethod
    def __getitem__(self, step: int) -> Any: ...

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Number of steps that read all data once."""

    @abc.abstractmethod
    def largest(self) -> Any:
        """Returns a batch of the largest shape that a step may have."""

    @abc.abstractmethod
    def described(self, step: int) -> list[dict[str, Any]]:
        """Returns a JSON description of the origin of a step's rows, such as document and position.

        Rows of padding are left out.
        """

    @staticmethod
    @abc.abstractmethod
    def positions(batch: Any) -> int:
        """Returns the number of tokens or frames in a batch, including padding."""

    @abc.abstractmethod
    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what each step of an epoch reads, given the order of the store's rows."""

    def epoch(self, step: int) -> float:
        """Returns the number of epochs that were read before a step, including the fraction of the
        last.
        """
        return step / self.steps_per_epoch

    @property
    def identity(self) -> dict[str, Any]:
        """JSON of everything that determines the content of a step."""
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
            # NumPy guarantees that random_raw returns the same bits in every version, but gives no
            # such guarantee for permutations.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed % 2**64, epoch]))
            order = np.argsort(bits.random_raw(len(order)), kind="stable")
        layout = self._laid_out(order)
        # A single assignment needs no lock, even if several threads read.
        self.__dict__["_last_layout"] = epoch, layout
        return layout
