"""Numbers that a model gives to held-out sentences."""

import numpy as np
from jaxtyping import Array, Float

from brt.data.sentences.store import SentenceStore
from brt.evaluation.correlation import pearson, spearman
from brt.evaluation.sentences import Scored, SentenceHead
from brt.training.objectives.regression import number_nats
from brt.types import TextBatch


class Regressor(SentenceHead):
    """The output is the number."""

    bits = "bits_per_number"

    @staticmethod
    def outputs(
        logits: Float[Array, "B 1"], batch: TextBatch
    ) -> tuple[Float[Array, "B 1"], Float[Array, " B"]]:
        """See the base class."""
        return logits, number_nats(logits, batch)

    @staticmethod
    def score(store: SentenceStore, order: list[int], outputs: Float[np.ndarray, "N 1"]) -> Scored:
        """See the base class; correlations are in percent."""
        true, guessed = store.targets[order], outputs[:, 0]
        figures = {
            "pearson": 100 * pearson(true, guessed),
            "spearman": 100 * spearman(true, guessed),
            "root_mean_square_error": float(np.sqrt(np.mean(np.square(true - guessed)))),
        }
        rows = [
            {"number": float(number), "prediction": float(guess)}
            for number, guess in zip(true, guessed, strict=True)
        ]
        shown = [f"{r['number']:g}, guessed {r['prediction']:.2f}" for r in rows]
        headline = f"Pearson {figures['pearson']:.2f} %, Spearman {figures['spearman']:.2f} %"
        return Scored(figures, headline, rows, shown)
