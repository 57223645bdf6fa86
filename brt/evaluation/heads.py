"""What evaluating an encoder's head gives, whatever the head."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from brt.errors import ConfigError, NonFiniteError
from brt.types import TextBatch


class Reading(NamedTuple):
    """Of a split, or of its beginning.

    Attributes:
      kind: of attention that it was read with.
      figures: JSON, most of them in percent.
      headline: the most telling of them in words.
      rows: JSON, one prediction each, in the order of the data.
      shown: some predictions as people read them.
    """

    kind: str
    figures: dict[str, Any]
    headline: str
    rows: list[dict[str, Any]]
    shown: list[str]


class Timed:
    """A compiled function of parameters and a batch, and what it took.

    Attributes:
      seconds: in the function, compilation not counted.
      tokens: that it read, without padding.
    """

    def __init__(self, function: Callable[..., PyTree[Array]]):
        self._function = jax.jit(function)
        self._compiled: dict[Any, Any] = {}
        self.seconds, self.tokens = 0.0, 0

    def __call__(self, params: PyTree[Array], batch: TextBatch, *more: np.ndarray) -> Any:
        """The function's value on the host.

        Raises:
          NonFiniteError: something in it is not finite.
        """
        arguments = (params, batch, *more)
        shape = batch.tokens.shape
        if shape not in self._compiled:
            self._compiled[shape] = self._function.lower(*arguments).compile()
        begin = time.perf_counter()
        found = jax.block_until_ready(self._compiled[shape](*arguments))
        self.seconds += time.perf_counter() - begin
        self.tokens += int(batch.valid.sum())
        found = jax.device_get(found)
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(found)):
            raise NonFiniteError(
                "the model's logits are not finite; take an earlier checkpoint (--step)"
            )
        return found

    def restart(self) -> None:
        """Counts from zero."""
        self.seconds, self.tokens = 0.0, 0

    def figures(self) -> dict[str, int | float]:
        """Time and speed."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
        }


def refuse_ablation(ablate: str | None) -> None:
    """Raises ConfigError where a memory is named although the model has none."""
    if ablate:
        raise ConfigError(
            f"--ablate={ablate} is for language models; an encoder carries no memory on"
        )


def some(count: int) -> Iterable[int]:
    """The places of a few of so many rows: the first, the middle and the last."""
    return sorted({0, count // 2, count - 1} - {-1}) if count else ()
