"""The tasks of text classification and text regression, for sentences or pairs of sentences."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config, Encoder
from brt.config.shared import TASK_SECTIONS
from brt.data.readers import TextReader
from brt.errors import ConfigError
from brt.tasks.encoders import EncoderTask
from brt.tasks.interface import Aux, Dataset, LossInputs, count_scored
from brt.tasks.report import SCORE, Metric
from brt.tasks.text_classification.evaluation import Classifier, Regressor, SentenceEvaluator
from brt.tasks.text_classification.preparation import NumberPreparation, SentencePreparation


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
    # It also defines the loss of a row.
    evaluator_class: ClassVar[type[SentenceEvaluator]] = Classifier

    def sizes_are_configured(self, config: Config) -> bool:
        """The size of the model's output is the number of labels, which depends on the data."""
        return False

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Also fills in the labels; their number must not differ from that of an existing run."""
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
        """The loss is smoothed by Training.label_smoothing; the nats of the `Aux` are not."""
        batch, logits = inputs.batch, self.training_logits(config, params, inputs)
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
            "classification_quickstart.gin", "Sentences.train = 'mine.jsonl'",
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
        """Sets one class, because the only logit is the predicted number."""
        config = EncoderTask.resolve(self, config, dataset)
        return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, classes=1))
