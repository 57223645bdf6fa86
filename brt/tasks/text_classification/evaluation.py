"""What a model says of held-out sentences: labels or numbers, row by row."""

import abc
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.distributed import rules
from brt.tasks.encoders import EncoderTask, Timed
from brt.tasks.heads import HeadEvaluator, HeadReading, columns
from brt.tasks.protocol import Dataset
from brt.tasks.text_classification import confusion
from brt.tasks.text_classification.correlation import pearson, spearman
from brt.tasks.text_classification.data.batches import SentenceReader
from brt.types import TextBatch

_SHOWN = 60  # characters of a text


class Scored(NamedTuple):
    """What all rows come to.

    Attributes:
      figures: JSON.
      summary: the most telling of them in words.
      rows: JSON, one prediction each.
      shown: the same as people read them.
    """

    figures: dict[str, Any]
    summary: str
    rows: list[dict[str, Any]]
    shown: list[str]


class SentenceEvaluator(HeadEvaluator):
    """Reads sentences, whatever a head says of them.

    Attributes:
      bits: the name of the figure of bits for each row.
      score_name: of the figure that sums up, in percent.
      forms: of the figures in a table.
    """

    bits: ClassVar[str]
    score_name: ClassVar[str]
    forms: ClassVar[dict[str, str]]

    def __init__(
        self, task: EncoderTask, config: Config, dataset: Dataset, split: str,
        trained: Config | None = None, beside: bool = False,
    ):  # fmt: skip
        self._task, self._section = task, config.sentences
        self._size = config.evaluation.batch_size
        super().__init__(config, dataset, split, trained, beside)

    @staticmethod
    @abc.abstractmethod
    def outputs(logits: Float[Array, "B C"]) -> Float[Array, "B C"]:
        """What is to be known of each row."""

    @staticmethod
    @abc.abstractmethod
    def nats(logits: Float[Array, "B C"], batch: TextBatch) -> Float[Array, " B"]:
        """-log p of each row's target; 0 in empty rows. Training sums the same."""

    @abc.abstractmethod
    def scored(self, order: list[int], outputs: Float[np.ndarray, "N C"]) -> Scored:
        """What the outputs of these rows come to."""

    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """Outputs, and -log p as training has it."""

        def read(
            params: PyTree[Array], batch: TextBatch
        ) -> tuple[Float[Array, "B C"], Float[Array, " B"]]:
            logits = self._task.predict(config, params, batch)
            return self.outputs(logits), self.nats(logits, batch)

        return read

    def batches(self, limit: int) -> Iterator[TextBatch]:
        """See the base class."""
        return SentenceReader.evaluation(
            self.store, batch_size=rules.filled("lanes", self._size), limit=limit,
            buckets=self._section.buckets, max_length=self._section.max_length,
        )  # fmt: skip

    def reading(self, config: Config, found: dict[int, tuple], timed: Timed) -> HeadReading:
        """See the base class."""
        order, nats = list(found), [float(row[1]) for row in found.values()]
        scored = self.scored(order, np.stack([row[0] for row in found.values()]))
        kind = config.attention.kind
        figures = {
            "attention": kind,
            "rows": len(order),
            **scored.figures,
            "score": scored.figures[self.score_name],
            "score_name": self.score_name,
            self.bits: sum(nats) / math.log(2) / max(len(order), 1),
            "left_out": self.store.manifest["rows"]["bad"],
            **timed.speed("tokens"),
        }
        rows = [
            {"id": self.store.ids[row], **own, "nats": lost}
            for row, own, lost in zip(order, scored.rows, nats, strict=True)
        ]
        shown = [
            f"{self.store.ids[row]}, {self._begun(row)}: {said}"
            for row, said in zip(order, scored.shown, strict=True)
        ]
        return HeadReading(kind, figures, scored.summary, rows, shown)

    def _begun(self, row: int) -> str:
        """How the texts of a row begin."""
        texts = self.dataset.tokenizer.texts(self.store.read(row))
        return " / ".join(repr(textwrap.shorten(t, _SHOWN, placeholder=" ...")) for t in texts)

    def table(self, report: dict[str, Any], readings: list[HeadReading]) -> list[str]:
        """See the base class."""
        left_out = f" ({report['left_out']:,} left out)" if report["left_out"] else ""
        title = f"{report['rows']:,} sentences{left_out}, trained with {report['trained_with']}"
        return [f"{title} attention", "", *columns(report, readings, self.forms)]


class Classifier(SentenceEvaluator):
    """Outputs are log probabilities of the labels.

    Accuracy: rows whose likeliest label is theirs, in percent of all rows; F1 and Matthews of the
    same guesses. Bits: -log2 p of the true labels over all rows, never smoothed. Rows that were
    left out and rows that fill a batch count nowhere; of a long row only what was kept is read.
    """

    bits, score_name, summary = "bits_per_label", "accuracy", ("accuracy", "{:.2f} % right")
    forms = {
        "accuracy": "{:.2f} %", "f1": "{:.2f} %", "matthews": "{:.4f}", "bits_per_label": "{:.4f}",
    }  # fmt: skip

    @staticmethod
    def outputs(logits: Float[Array, "B C"]) -> Float[Array, "B C"]:
        """See the base class."""
        return jax.nn.log_softmax(logits)

    @staticmethod
    def nats(logits: Float[Array, "B C"], batch: TextBatch) -> Float[Array, " B"]:
        """Cross-entropy of the label."""
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets[:, 0])
        return jnp.where(batch.scored[:, 0], nats, 0.0)

    def scored(self, order: list[int], outputs: Float[np.ndarray, "N C"]) -> Scored:
        """See the base class."""
        labels, true = self.store.labels, self.store.targets[order]
        guesses = np.argmax(outputs, axis=1)
        figures = scores(confusion.confusion(true, guesses, len(labels)), labels)
        rows = [
            {
                "label": labels[label],
                "prediction": labels[guess],
                "probabilities": np.exp(own).round(6).tolist(),
            }
            for label, guess, own in zip(true, guesses, outputs, strict=True)
        ]
        shown = [
            f"{r['label']}, guessed {r['prediction']} ({max(r['probabilities']):.0%})" for r in rows
        ]
        summary = f"{figures['accuracy']:.2f} % right, Matthews {figures['matthews']:.3f}"
        return Scored(figures, summary, rows, shown)


class Regressor(SentenceEvaluator):
    """The output is the number.

    Correlations in percent, over all rows; the error is the root of the mean square over all rows.
    Bits: -log2 of the density of the true numbers, of variance 1 around the outputs, over all
    rows. Rows count as a classifier's do.
    """

    bits, score_name, summary = "bits_per_number", "pearson", ("pearson", "Pearson {:.2f} %")
    forms = {
        "pearson": "{:.2f} %", "spearman": "{:.2f} %", "root_mean_square_error": "{:.3f}",
        "bits_per_number": "{:.4f}",
    }  # fmt: skip

    @staticmethod
    def outputs(logits: Float[Array, "B 1"]) -> Float[Array, "B 1"]:
        """See the base class."""
        return logits

    @staticmethod
    def nats(logits: Float[Array, "B 1"], batch: TextBatch) -> Float[Array, " B"]:
        """Of a normal distribution of variance 1 around the logit."""
        nats = jnp.square(logits - batch.targets) / 2 + math.log(2 * math.pi) / 2
        return jnp.where(batch.scored, nats, 0.0)[:, 0]

    def scored(self, order: list[int], outputs: Float[np.ndarray, "N 1"]) -> Scored:
        """See the base class; correlations are in percent."""
        true, guessed = self.store.targets[order], outputs[:, 0]
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
        summary = f"Pearson {figures['pearson']:.2f} %, Spearman {figures['spearman']:.2f} %"
        return Scored(figures, summary, rows, shown)


def scores(table: confusion.Confusion, labels: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy and F1 in percent; F1 is that of the second of two labels."""
    found = {
        "accuracy": 100 * confusion.accuracy(table),
        "matthews": confusion.matthews(table),
        "labels": list(labels),
        "confusion": table.tolist(),
    }
    return {**found, "f1": 100 * confusion.f1(table)} if len(labels) == 2 else found
