"""Reading held-out sentences row by row, whatever a head says of them."""

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data.sentences.batches import SentenceReader
from brt.data.sentences.store import SentenceStore
from brt.evaluation.heads import Reading, Timed, some
from brt.training.objectives.encoders import network
from brt.types import TextBatch


class Scored(NamedTuple):
    """What all rows come to.

    Attributes:
      figures: JSON.
      headline: the most telling of them in words.
      rows: JSON, one prediction each.
      shown: the same as people read them.
    """

    figures: dict[str, Any]
    headline: str
    rows: list[dict[str, Any]]
    shown: list[str]


class SentenceHead(abc.ABC):
    """Reads stores; compiled once for each padded length.

    Attributes:
      bits: the name of the figure of bits for each row.
    """

    bits: ClassVar[str]

    def __init__(self, config: Config):
        self._config = config

        def read(
            params: PyTree[Array], batch: TextBatch
        ) -> tuple[Float[Array, "B C"], Float[Array, " B"]]:
            key = jax.random.key(0)  # of what attention draws: always the same
            logits = network(config).apply({"params": params}, batch.tokens, batch.valid, key)
            return self.outputs(logits, batch)

        self._read = Timed(read)

    @staticmethod
    @abc.abstractmethod
    def outputs(
        logits: Float[Array, "B C"], batch: TextBatch
    ) -> tuple[Float[Array, "B C"], Float[Array, " B"]]:
        """What is to be known of each row, and its -log p as training has it."""

    @staticmethod
    @abc.abstractmethod
    def score(store: SentenceStore, order: list[int], outputs: Float[np.ndarray, "N C"]) -> Scored:
        """What the outputs of these rows come to."""

    def __call__(
        self,
        params: PyTree[Array],
        store: SentenceStore,
        *,
        limit: int = 0,
        stop: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda count: None,
    ) -> Reading | None:
        """What the model makes of a store; None if asked to stop on the way.

        Args:
          limit: only the first so many, as one batch; 0: all.
          progress: called with the number of rows done since the last call.
        """
        self._read.restart()
        found: dict[int, tuple[np.ndarray, float]] = {}
        section = self._config.sentences
        reader = SentenceReader(
            store=store, batch_size=self._config.evaluation.batch_size, buckets=section.buckets,
            max_length=section.max_length, shuffle=False,
        )  # fmt: skip
        for batch in reader.once(limit):
            if stop():
                return None
            outputs, nats = self._read(params, batch)
            for i in np.flatnonzero(batch.row >= 0):
                found[int(batch.row[i])] = outputs[i], float(nats[i])
            progress(int((batch.row >= 0).sum()))
        return self._reading(store, found)

    def _reading(self, store: SentenceStore, found: dict[int, tuple[np.ndarray, float]]) -> Reading:
        order = sorted(found)
        nats = [found[row][1] for row in order]
        scored = self.score(store, order, np.stack([found[row][0] for row in order]))
        kind = self._config.attention.kind
        figures = {
            "attention": kind,
            "rows": len(order),
            **scored.figures,
            self.bits: sum(nats) / math.log(2) / max(len(order), 1),
            "left_out": store.manifest["rows"]["bad"],
            **self._read.figures(),
        }
        rows = [
            {"id": store.ids[row], **own, "nats": lost}
            for row, own, lost in zip(order, scored.rows, nats, strict=True)
        ]
        shown = [f"{rows[i]['id']}: {scored.shown[i]}" for i in some(len(rows))]
        return Reading(kind, figures, scored.headline, rows, shown)
