"""Labels that a model gives to held-out sentences."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from brt.data.sentences.store import SentenceStore
from brt.evaluation import confusion
from brt.evaluation.sentences import Scored, SentenceHead
from brt.training.objectives.classification import label_nats
from brt.types import TextBatch


class Classifier(SentenceHead):
    """Outputs are log probabilities of the labels."""

    bits = "bits_per_label"

    @staticmethod
    def outputs(
        logits: Float[Array, "B C"], batch: TextBatch
    ) -> tuple[Float[Array, "B C"], Float[Array, " B"]]:
        """See the base class."""
        return jax.nn.log_softmax(logits), label_nats(logits, batch)

    @staticmethod
    def score(store: SentenceStore, order: list[int], outputs: Float[np.ndarray, "N C"]) -> Scored:
        """See the base class."""
        guesses = np.argmax(outputs, axis=1)
        table = confusion.confusion(store.targets[order], guesses, len(store.labels))
        figures = scores(table, store.labels)
        rows = [
            {
                "label": store.labels[store.targets[row]],
                "prediction": store.labels[guess],
                "probabilities": np.exp(own).round(6).tolist(),
            }
            for row, guess, own in zip(order, guesses, outputs, strict=True)
        ]
        shown = [
            f"{r['label']}, guessed {r['prediction']} ({max(r['probabilities']):.0%})" for r in rows
        ]
        headline = f"{figures['accuracy']:.2f} % right, Matthews {figures['matthews']:.3f}"
        return Scored(figures, headline, rows, shown)


def scores(table: confusion.Confusion, labels: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy and F1 in percent; F1 is that of the second of two labels."""
    found = {
        "accuracy": 100 * confusion.accuracy(table),
        "matthews": confusion.matthews(table),
        "labels": list(labels),
        "confusion": table.tolist(),
    }
    return {**found, "f1": 100 * confusion.f1(table)} if len(labels) == 2 else found
