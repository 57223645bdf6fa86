"""The tasks of text classification and text regression, for sentences or pairs of sentences.

A row is a sentence or a pair of sentences, with a label or a number that the model predicts. In
shapes, B is the number of rows in a batch, N the number of evaluated rows, and C the number of the
model's outputs for a row: the number of labels, or 1 for a number.
"""

import abc
import dataclasses
import math
import textwrap
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Config, Encoder
from brt.config.shared import TASK_SECTIONS
from brt.data.readers import TextReader
from brt.data.tokenizers import Ids
from brt.errors import ConfigError
from brt.tasks.encoders import EncoderTask, HeadEvaluator, HeadResult
from brt.tasks.interface import Aux, Dataset, LossInputs, count_scored
from brt.tasks.report import SCORE, Metric
from brt.tasks.text_classification.preparation import NumberPreparation, SentencePreparation
from brt.types import TextBatch

_SHOWN = 60  # An example shows at most this number of characters of a text.
Confusion = Int[np.ndarray, "true guessed"]
Numbers = Float[np.ndarray, " N"]


class SentenceEvaluator(HeadEvaluator):
    """Base class of the evaluators of labels and of numbers that are predicted for sentences.

    A subclass defines what the logits of the model mean.
    """

    bits: ClassVar[str]  # name of the metric with the bits per row
    score_name: ClassVar[str]  # name of the metric, in percent, that is the score
    rows = "rows", "sentences"

    @staticmethod
    @abc.abstractmethod
    def predictions(logits: Float[Array, "B C"]) -> Float[Array, "B C"]:
        """Converts logits to what is scored, such as the log probabilities of C labels."""

    @staticmethod
    @abc.abstractmethod
    def nats(logits: Float[Array, "B C"], batch: TextBatch) -> Float[Array, " B"]:
        """Returns -log p of each row's target, without label smoothing; 0 for empty rows, which
        only fill up a batch.
        """

    @abc.abstractmethod
    def score(self, order: list[int], predictions: Float[np.ndarray, "N C"]) -> HeadResult:
        """Compares the predictions with the true labels or numbers in the store.

        The result has each prediction, and the metrics that are computed from predictions alone.
        For each row of `predictions`, `order` has the index of the row in the store.
        """

    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """Returns a function that computes the predictions, and -log p of each row's target."""

        def read(
            params: PyTree[Array], batch: TextBatch
        ) -> tuple[Float[Array, "B C"], Float[Array, " B"]]:
            logits = self.task.predict(config, params, batch)
            return self.predictions(logits), self.nats(logits, batch)

        return read

    def summarize(self, outputs: dict[int, tuple], seconds: float) -> HeadResult:
        order, nats = list(outputs), [float(row[1]) for row in outputs.values()]
        scores = self.score(order, np.stack([row[0] for row in outputs.values()]))
        metrics = {
            "rows": len(order),
            **scores.metrics,
            "score": scores.metrics[self.score_name],
            "score_name": self.score_name,
            self.bits: sum(nats) / math.log(2) / max(len(order), 1),
        }
        rows = [
            {"id": self.store.ids[row], **prediction, "nats": row_nats}
            for row, prediction, row_nats in zip(order, scores.rows, nats, strict=True)
        ]
        shown = [
            f"{self.store.ids[row]}, {self._beginning(row)}: {text}"
            for row, text in zip(order, scores.shown, strict=True)
        ]
        return HeadResult(metrics, scores.summary, rows, shown)

    def _beginning(self, row: int) -> str:
        texts = self.dataset.tokenizer.texts(self.store.read(row))
        return " / ".join(repr(textwrap.shorten(t, _SHOWN, placeholder=" ...")) for t in texts)


class Classifier(SentenceEvaluator):
    """Evaluates classification; the predictions are log probabilities of the labels.

    Accuracy, F1 and Matthews correlation are computed from the most likely label of each row.
    Accuracy and F1 are percentages. If there are two labels, F1 is the F1 score of the second
    label; otherwise there is no F1. Bits are -log2 p of the true labels without smoothing, averaged
    over rows. Rows that were left out when the data were prepared do not count. Rows that were cut
    to Data.max_length tokens do count, although the model reads only a part of them.
    """

    bits, score_name, compared_metric = "bits_per_label", "accuracy", ("accuracy", "{:.2f} % right")
    forms = {
        "accuracy": "{:.2f} %", "f1": "{:.2f} %", "matthews": "{:.4f}", "bits_per_label": "{:.4f}",
    }  # fmt: skip

    @staticmethod
    def predictions(logits: Float[Array, "B C"]) -> Float[Array, "B C"]:
        return jax.nn.log_softmax(logits)

    @staticmethod
    def nats(logits: Float[Array, "B C"], batch: TextBatch) -> Float[Array, " B"]:
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets[:, 0])
        return jnp.where(batch.scored[:, 0], nats, 0.0)

    def score(self, order: list[int], predictions: Float[np.ndarray, "N C"]) -> HeadResult:
        labels, true = self.store.labels, self.store.targets[order]
        guesses = np.argmax(predictions, axis=1)
        table = confusion(true, guesses, len(labels))
        metrics = {
            "accuracy": 100 * accuracy(table),
            "matthews": matthews(table),
            "labels": list(labels),
            "confusion": table.tolist(),
        }
        if len(labels) == 2:
            metrics["f1"] = 100 * f1(table)
        rows = [
            {
                "label": labels[label],
                "prediction": labels[guess],
                "probabilities": np.exp(log_probs).round(6).tolist(),
            }
            for label, guess, log_probs in zip(true, guesses, predictions, strict=True)
        ]
        shown = [
            f"{r['label']}, guessed {r['prediction']} ({max(r['probabilities']):.0%})" for r in rows
        ]
        summary = f"{metrics['accuracy']:.2f} % right, Matthews {metrics['matthews']:.3f}"
        return HeadResult(metrics, summary, rows, shown)


class Regressor(SentenceEvaluator):
    """Evaluates regression; the prediction for a row is a number.

    Correlations are in percent. Bits are -log2 of the density of the true number under a normal
    distribution of variance 1 around the prediction, averaged over rows. Rows that were left out
    when the data were prepared do not count.
    """

    bits, score_name = "bits_per_number", "pearson"
    compared_metric = "pearson", "Pearson {:.2f} %"
    forms = {
        "pearson": "{:.2f} %", "spearman": "{:.2f} %", "root_mean_square_error": "{:.3f}",
        "bits_per_number": "{:.4f}",
    }  # fmt: skip

    @staticmethod
    def predictions(logits: Float[Array, "B 1"]) -> Float[Array, "B 1"]:
        return logits

    @staticmethod
    def nats(logits: Float[Array, "B 1"], batch: TextBatch) -> Float[Array, " B"]:
        """The prediction is a normal distribution of variance 1, whose mean is the logit."""
        nats = jnp.square(logits - batch.targets) / 2 + math.log(2 * math.pi) / 2
        return jnp.where(batch.scored, nats, 0.0)[:, 0]

    def score(self, order: list[int], predictions: Float[np.ndarray, "N 1"]) -> HeadResult:
        true, guessed = self.store.targets[order], predictions[:, 0]
        metrics = {
            "pearson": 100 * pearson(true, guessed),
            "spearman": 100 * spearman(true, guessed),
            "root_mean_square_error": float(np.sqrt(np.mean(np.square(true - guessed)))),
        }
        rows = [
            {"number": float(number), "prediction": float(guess)}
            for number, guess in zip(true, guessed, strict=True)
        ]
        shown = [f"{r['number']:g}, guessed {r['prediction']:.2f}" for r in rows]
        summary = f"Pearson {metrics['pearson']:.2f} %, Spearman {metrics['spearman']:.2f} %"
        return HeadResult(metrics, summary, rows, shown)


def confusion(true: Ids, guessed: Ids, labels: int) -> Confusion:
    """Returns the number of rows with each pair of true and predicted label."""
    table = np.zeros((labels, labels), np.int64)
    np.add.at(table, (np.asarray(true, int), np.asarray(guessed, int)), 1)
    return table


def accuracy(table: Confusion) -> float:
    """Returns the fraction of rows whose label was predicted correctly; 0 if there are no rows."""
    return float(np.trace(table) / max(table.sum(), 1))


def f1(table: Confusion, label: int = 1) -> float:
    """Returns the F1 score of one label, from 0 to 1; 0 if it neither occurs nor is predicted."""
    both = table[label].sum() + table[:, label].sum()
    return float(2 * table[label, label] / both) if both else 0.0


def matthews(table: Confusion) -> float:
    """Returns the Matthews correlation, generalised to several labels by Gorodkin (2004, eq. 8).

    The result is from -1 to 1, and 0 if all rows have the same label or the same prediction.
    """
    true, guessed, total = table.sum(axis=1), table.sum(axis=0), int(table.sum())
    covariance = total * int(np.trace(table)) - int(true @ guessed)
    scale = (total**2 - int(true @ true)) * (total**2 - int(guessed @ guessed))
    return covariance / scale**0.5 if scale else 0.0


def pearson(x: Numbers, y: Numbers) -> float:
    return (
        float(scipy.stats.pearsonr(np.float64(x), np.float64(y)).statistic) if _vary(x, y) else 0.0
    )


def spearman(x: Numbers, y: Numbers) -> float:
    """Returns Spearman's rank correlation; equal numbers share a rank."""
    return float(scipy.stats.spearmanr(x, y).statistic) if _vary(x, y) else 0.0


def _vary(*numbers: Numbers) -> bool:
    return all(len(x) > 1 and bool(np.ptp(x)) for x in numbers)


class TextClassification(EncoderTask):
    """The task that predicts the label of a sentence or of a pair of sentences."""

    name = "text_classification"
    head = "classification"
    sections = TASK_SECTIONS["text_classification"]
    data, preparation = "sentences", SentencePreparation
    row_reader = TextReader
    metrics = (
        Metric("bits_per_label", "bits per label"),
        Metric("accuracy", "accuracy %", ".2f"),
        Metric("f1", "F1 %", ".2f"),
        Metric("matthews", "Matthews", ".4f"),
    )
    table_metrics = (SCORE,)
    # The method `nats` of this class also defines the loss of a row in training.
    evaluator_class: ClassVar[type[SentenceEvaluator]] = Classifier

    def sizes_are_configured(self, config: Config) -> bool:
        """Returns False, because the model has one output per label of the data."""
        return False

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Also fills in the labels and their number.

        Raises ConfigError if an existing run has another number of labels.
        """
        config = super().resolve(config, dataset)
        labels, classes = dataset.split("train").labels, config.encoder.classes
        if classes not in (Encoder.classes, len(labels)) and not config.training.init_from:
            raise ConfigError(
                f"the model has {classes} classes, but Data.train has {len(labels)} labels, "
                f"{', '.join(labels)}; restore the earlier data, or choose another --workdir"
            )
        return dataclasses.replace(
            config,
            encoder=dataclasses.replace(config.encoder, classes=len(labels)),
            sentences=dataclasses.replace(config.sentences, labels=labels),
        )

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """Training.label_smoothing smooths the loss, but not the nats in the returned `Aux`."""
        batch = inputs.batch
        logits = self.predict(config, params, batch, inputs.key)
        nats = jnp.sum(self.evaluator_class.nats(logits, batch))
        aux = Aux(nats, count_scored(batch.scored))
        share = config.training.label_smoothing
        if not share:
            return nats, aux
        uniform_nats = -jnp.mean(jax.nn.log_softmax(logits), axis=-1)
        smoothed = jnp.sum(jnp.where(batch.scored[:, 0], uniform_nats, 0.0))
        return (1 - share) * nats + share * smoothed, aux

    def next_steps(self, workdir: str) -> list[str]:
        numbers = self.preparation.numbers
        column = "score" if numbers else "label"
        return self.steps_with_own_data(
            workdir, f'sentences, a line of {{"sentence": ..., "{column}": ...}} each',
            "classification_quickstart.gin", "mine.jsonl",
            f"--gin_bindings=\"Training.task = '{self.name}'\" " if numbers else "",
        )  # fmt: skip


class TextRegression(TextClassification):
    """The task that predicts a number for a sentence or a pair of sentences.

    The model predicts a normal distribution of variance 1, whose mean is the predicted number.
    """

    name = "text_regression"
    metrics = (
        Metric("bits_per_number", "bits per number"),
        Metric("pearson", "Pearson %", ".2f"),
        Metric("spearman", "Spearman %", ".2f"),
        Metric("root_mean_square_error", "root mean square error", ".3f"),
    )
    preparation, evaluator_class = NumberPreparation, Regressor
    unsmoothed = "regression"

    def check(self, config: Config) -> None:
        if labels := config.sentences.labels:
            raise ConfigError(
                f"Sentences.labels = {labels} is for classes; regression reads numbers"
            )
        super().check(config)

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Sets Encoder.classes to 1, because the model's only logit is the predicted number."""
        config = EncoderTask.resolve(self, config, dataset)
        return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, classes=1))
