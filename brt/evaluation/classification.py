"""Labels that a model gives to held-out sentences."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data.sentences.batches import SentenceReader
from brt.data.sentences.store import SentenceStore
from brt.evaluation import confusion
from brt.evaluation.heads import Reading, Timed, some
from brt.training.objectives.classification import label_nats
from brt.training.objectives.encoders import network
from brt.types import TextBatch


class Classifier:
    """Reads stores; compiled once for each padded length."""

    def __init__(self, config: Config):
        self._config = config

        def read(
            params: PyTree[Array], batch: TextBatch
        ) -> tuple[Float[Array, "B C"], Float[Array, " B"]]:
            key = jax.random.key(0)  # of what attention draws: always the same
            logits = network(config).apply({"params": params}, batch.tokens, batch.valid, key)
            return jax.nn.log_softmax(logits), label_nats(logits, batch)

        self._read = Timed(read)

    def __call__(
        self,
        params: PyTree[Array],
        store: SentenceStore,
        *,
        limit: int = 0,
        stop: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda count: None,
    ) -> Reading | None:
        """The labels of a store; None if asked to stop on the way.

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
            log_probs, nats = self._read(params, batch)
            for i in np.flatnonzero(batch.row >= 0):
                found[int(batch.row[i])] = log_probs[i], float(nats[i])
            progress(int((batch.row >= 0).sum()))
        return self._reading(store, found)

    def _reading(self, store: SentenceStore, found: dict[int, tuple[np.ndarray, float]]) -> Reading:
        order = sorted(found)
        guesses = [int(np.argmax(found[row][0])) for row in order]
        table = confusion.confusion(store.targets[order], guesses, len(store.labels))
        figures = {"attention": self._config.attention.kind, **scores(table, store.labels)}
        bits = sum(found[row][1] for row in order) / math.log(2)
        figures |= {
            "bits_per_label": bits / max(len(order), 1),
            "left_out": store.manifest["rows"]["bad"],
            **self._read.figures(),
        }
        rows = [
            {
                "id": store.ids[row],
                "label": store.labels[store.targets[row]],
                "prediction": store.labels[guess],
                "nats": found[row][1],
                "probabilities": np.exp(found[row][0]).round(6).tolist(),
            }
            for row, guess in zip(order, guesses, strict=True)
        ]
        shown = [
            f"{r['id']}: {r['label']}, guessed {r['prediction']} ({max(r['probabilities']):.0%})"
            for r in (rows[place] for place in some(len(rows)))
        ]
        headline = f"{figures['accuracy']:.2f} % right, Matthews {figures['matthews']:.3f}"
        return Reading(self._config.attention.kind, figures, headline, rows, shown)


def scores(table: confusion.Confusion, labels: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy and F1 in percent; F1 is that of the second of two labels."""
    found = {
        "rows": int(table.sum()),
        "accuracy": 100 * confusion.accuracy(table),
        "matthews": confusion.matthews(table),
        "labels": list(labels),
        "confusion": table.tolist(),
    }
    return {**found, "f1": 100 * confusion.f1(table)} if len(labels) == 2 else found
