"""The extractive question answering task: find the span of a text that answers a question."""

from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.data.texts import tokenization
from brt.data.texts.tokenization import TextTokenizer
from brt.errors import ConfigError
from brt.ops.spans import span_nats
from brt.tasks.encoders import EncoderTask, encoder_next_steps, own_data_binding, refuse_ablation
from brt.tasks.extractive_qa.data import preparation
from brt.tasks.extractive_qa.data.batches import QuestionReader
from brt.tasks.extractive_qa.data.preparation import Preparation, QuestionDataset
from brt.tasks.extractive_qa.evaluation import AnswerEvaluator
from brt.tasks.interface import Aux, Dataset, EvaluationRequest, LossInputs, count_scored
from brt.tasks.report import SCORE, Metric


class ExtractiveQa(EncoderTask):
    """The task of predicting the first and the last token of an answer within a context.

    The context is the text that contains the answer. A long context is cut into windows, and the
    model reads the question with one window at a time. In windows without the answer, both targets
    are token 0 of the input.
    """

    name = "extractive_qa"
    head = "spans"
    sections = TASK_SECTIONS["extractive_qa"]
    data = "questions"
    metrics = (
        Metric("bits_per_place", "bits per place"),
        Metric("exact_match", "exact match %", ".2f"),
        Metric("f1", "F1 %", ".2f"),
    )
    table_metrics = (SCORE,)

    def check(self, config: Config) -> None:
        """Raises ConfigError for label smoothing, which has no effect, and if the encoder cannot
        read windows of Data.max_length tokens.
        """
        smoothing = config.training.label_smoothing
        if smoothing:
            raise ConfigError(
                f"Training.label_smoothing = {smoothing} has no effect on spans; remove it"
            )
        self.check_encoder(config, ("Data.max_length", config.questions.max_length))

    def open(self, config: Config, *, progress: bool = True) -> QuestionDataset:
        """Opens the questions and contexts of all splits, and prepares them first if necessary.

        Args:
          config: the config, which names the sources.
          progress: True reports the progress of preparing the data on stderr.
        """
        return preparation.prepare(config.questions, progress)

    def open_split(
        self, config: Config, split: str, tokenizer: TextTokenizer, known: Path | None = None
    ) -> QuestionDataset:
        """Opens one split of the data, encoded with the tokenizer of a trained model.

        Args:
          config: the config, which names the sources of the split.
          split: name of the split.
          tokenizer: the tokenizer of the run that trained the model.
          known: directory in which the run prepared the same data before; None if there is none.
        """
        return Preparation(config.questions).open_split(split, tokenizer, known)

    def load_tokenizer(self, file: Path) -> TextTokenizer:
        """Returns the tokenizer that a run has saved in `file`."""
        return tokenization.load(str(file), "Data.tokenizer")

    def reader(self, config: Config, dataset: Dataset) -> QuestionReader:
        """Returns a reader of batches of training windows, in a new order every epoch."""
        section, t = config.questions, config.training
        return QuestionReader(
            store=dataset.split("train"), batch_size=t.batch_size, buckets=section.buckets,
            seed=t.seed, max_length=section.max_length,
        )  # fmt: skip

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """Returns the cross-entropy of the answers' first and last tokens, summed over a batch.

        The second result, from which metrics are computed, has the same sum and the number of
        scored targets, two for each window.

        Args:
          config: config of the model.
          params: parameters of the encoder and its head.
          inputs: the batch of windows, and the random key for dropout and attention.
        """
        batch, logits = inputs.batch, self.training_logits(config, params, inputs)
        nats = jnp.sum(span_nats(logits, batch.targets, batch.scored))
        return nats, Aux(nats, count_scored(batch.scored))

    def evaluator(self, request: EvaluationRequest) -> AnswerEvaluator:
        """Returns an evaluator that measures exact match and F1 of predicted answers.

        Args:
          request: the config of the model, and the split.

        Raises:
          ConfigError: `request.ablate` names a memory that the evaluation should reset, but
            encoders have no memory.
        """
        refuse_ablation(request.ablate)
        return AnswerEvaluator(self, request)

    def next_steps(self, workdir: str) -> list[str]:
        """Returns lines for the user with commands that evaluate the run in `workdir`, and that
        train on the user's own questions.
        """
        return [
            *encoder_next_steps(workdir),
            "with your own questions, in files of SQuAD's form:",
            "python -m brt.train --gin_file=configs/runs/spans_quickstart.gin "
            f"--workdir=runs/mine {own_data_binding('Questions', 'json')}",
        ]
