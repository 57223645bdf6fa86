"""The base class of readers, which return the batch of any training step.

An epoch is one pass over all data, in an order that the seed and the number of the epoch determine.
A batch depends only on the seed and the number of the step, so a resumed run can continue at any
step without reading the batches before.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reader(abc.ABC):
    """Base class of readers: `reader[step]` is the batch of a step, counted from 0.

    A batch is a NamedTuple of NumPy arrays whose first axis is the rows of the batch (lanes). It
    depends only on the step and on the values in `identity`.
    """

    store: Any  # the data: an object with a length and a `fingerprint`, a hash of its content
    batch_size: int  # the number of rows of a batch, over all processes
    seed: int = 0  # determines the order of the data in each epoch
    shuffle: bool = True  # False reads every epoch in the order of the store, as evaluation does
    # Indices of the rows that the batches of this process contain; None for all rows.
    lanes: Sequence[int] | None = None

    def __len__(self) -> int:
        """Returns a huge number, because the sequence of batches does not end."""
        return 1 << 62

    @abc.abstractmethod
    def __getitem__(self, step: int) -> Any: ...

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Number of steps that read all data once."""

    @abc.abstractmethod
    def largest(self) -> Any:
        """Returns a batch of the largest shape, which tells how much memory a step needs."""

    @abc.abstractmethod
    def described(self, step: int) -> list[dict[str, Any]]:
        """Returns the origin of each row of a step, such as a document and a position, as JSON."""

    @staticmethod
    @abc.abstractmethod
    def positions(batch: Any) -> int:
        """Returns the number of tokens or frames in a batch, including padding."""

    @abc.abstractmethod
    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Assigns the data of an epoch to its steps; `order` has indices of the store's items.

        They are in the order in which the epoch reads the items. A subclass defines the content of
        the two returned arrays, and uses them in `__getitem__`.
        """

    def epoch(self, step: int) -> float:
        """Returns the number of epochs that the steps before `step` read; it may be a fraction."""
        return step / self.steps_per_epoch

    @property
    def identity(self) -> dict[str, Any]:
        """JSON of everything that determines the content of each batch."""
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
            # NumPy guarantees that the bits of random_raw are the same in every version. There is
            # no such guarantee for NumPy's permutations.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed % 2**64, epoch]))
            order = np.argsort(bits.random_raw(len(order)), kind="stable")
        layout = self._laid_out(order)
        # Assigning an entry of a dict is atomic, so threads that call this method need no lock.
        self.__dict__["_last_layout"] = epoch, layout
        return layout
