"""Sentences, or pairs of them, with a label or a number each."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config, Encoder
from brt.data.texts import tokenization
from brt.data.texts.tokenization import TextTokenizer
from brt.errors import ConfigError
from brt.tasks.encoders import EncoderTask, next_of_encoder, own_rows, refuse_ablation
from brt.tasks.protocol import Aux, Dataset, count_of
from brt.tasks.report import SCORE, Metric
from brt.tasks.text_classification.data import preparation
from brt.tasks.text_classification.data.batches import SentenceReader
from brt.tasks.text_classification.data.preparation import Preparation, SentenceCorpus
from brt.tasks.text_classification.evaluation import Classifier, Regressor, SentenceEvaluator
from brt.types import TextBatch

_DROPOUT, _ATTENTION = 0, 1  # what the key of a step is folded with


class TextClassification(EncoderTask):
    """The label of a sentence."""

    name = "text_classification"
    head = "classification"
    sections = ("Encoder", "Attention", "Sentences")
    data = "sentences"
    metrics = (
        Metric("bits_per_label", "bits per label"),
        Metric("accuracy", "accuracy %", ".2f", higher_is_better=True),
        Metric("f1", "F1 %", ".2f", higher_is_better=True),
        Metric("matthews", "Matthews", ".4f", higher_is_better=True),
    )
    columns = (SCORE,)
    evaluators: ClassVar[type[SentenceEvaluator]] = Classifier
    numbers: ClassVar[bool] = False

    def check(self, config: Config) -> None:
        """The length of sentences fits the model."""
        self.check_encoder(config, ("Sentences.max_length", config.sentences.max_length))

    def open(self, config: Config, *, progress: bool = True) -> SentenceCorpus:
        """Sentences with their labels."""
        return preparation.prepare(config.sentences, progress, numbers=self.numbers)

    def open_split(
        self, config: Config, split: str, tokenizer: TextTokenizer, *,
        known: Path | None = None, progress: bool = True,
    ) -> SentenceCorpus:  # fmt: skip
        """See the base class."""
        return Preparation(config.sentences, progress, self.numbers).open_split(
            split, tokenizer, known
        )

    def load_tokenizer(self, file: Path) -> TextTokenizer:
        """See the base class."""
        return tokenization.load(str(file), "Sentences.tokenizer")

    def knows_sizes(self, config: Config) -> bool:
        """How many labels there are the data say."""
        return False

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Also the labels, in the order of the classifier's."""
        config = super().resolve(config, dataset)
        labels, classes = dataset.split("train").labels, config.encoder.classes
        if classes not in (Encoder.classes, len(labels)) and not config.training.init_from:
            raise ConfigError(
                f"Encoder.classes = {classes}, but Sentences.train has {len(labels)} labels, "
                f"{', '.join(labels)}; leave it out"
            )
        return dataclasses.replace(
            config,
            encoder=dataclasses.replace(config.encoder, classes=len(labels)),
            sentences=dataclasses.replace(config.sentences, labels=labels),
        )

    def reader(self, config: Config, dataset: Dataset) -> SentenceReader:
        """Rows in a new order every epoch."""
        section, t = config.sentences, config.training
        return SentenceReader(
            store=dataset.split("train"), batch_size=t.batch_size, buckets=section.buckets,
            seed=t.seed, max_length=section.max_length,
        )  # fmt: skip

    def loss(
        self,
        config: Config,
        params: PyTree[Array],
        carry: PyTree[Array],
        model_state: PyTree[Array],
        batch: TextBatch,
        key: Array,
    ) -> tuple[Float[Array, ""], Aux]:
        """The summed cross-entropy of the labels, smoothed as Training.label_smoothing says."""
        logits = self.predict(
            config, params, batch,
            dropout=jax.random.fold_in(key, _DROPOUT),
            attention=jax.random.fold_in(key, _ATTENTION),
        )  # fmt: skip
        nats = jnp.sum(self.evaluators.nats(logits, batch))
        aux = Aux(nats, count_of(batch.scored), carry, model_state, {})
        share = config.training.label_smoothing
        if not share:
            return nats, aux
        of_all = -jnp.mean(jax.nn.log_softmax(logits), axis=-1)
        smoothed = jnp.sum(jnp.where(batch.scored[:, 0], of_all, 0.0))
        return (1 - share) * nats + share * smoothed, aux

    def evaluator(
        self,
        config: Config,
        dataset: Dataset,
        split: str,
        *,
        trained: Config | None = None,
        ablate: str | None = None,
        beside: bool = False,
    ) -> SentenceEvaluator:
        """Labels, and how sure the model is of them."""
        refuse_ablation(ablate)
        return self.evaluators(self, config, dataset, split, trained, beside)

    def next_steps(self, workdir: str) -> list[str]:
        """With one's own sentences."""
        column = "score" if self.numbers else "label"
        task = f"--gin_bindings=\"Training.task = '{self.name}'\" " if self.numbers else ""
        return [
            *next_of_encoder(workdir),
            f'with your own sentences, a line of {{"sentence": ..., "{column}": ...}} each:',
            "python -m brt.train --gin_file=configs/runs/classification_quickstart.gin "
            f"{task}--workdir=runs/mine {own_rows('Sentences', 'jsonl')}",
        ]


class TextRegression(TextClassification):
    """The number of a sentence: the mean of a normal distribution of variance 1."""

    name = "text_regression"
    metrics = (
        Metric("bits_per_number", "bits per number"),
        Metric("pearson", "Pearson %", ".2f", higher_is_better=True),
        Metric("spearman", "Spearman %", ".2f", higher_is_better=True),
        Metric("root_mean_square_error", "root mean square error", ".3f"),
    )
    evaluators = Regressor
    numbers = True

    def check(self, config: Config) -> None:
        """Nothing that only classes have."""
        smoothing, labels = config.training.label_smoothing, config.sentences.labels
        if smoothing:
            raise ConfigError(
                f"Training.label_smoothing = {smoothing} means nothing to regression; leave it out"
            )
        if labels:
            raise ConfigError(
                f"Sentences.labels = {labels} is for classes; regression reads numbers"
            )
        super().check(config)

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """A number is the logit of one class."""
        config = EncoderTask.resolve(self, config, dataset)
        return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, classes=1))
