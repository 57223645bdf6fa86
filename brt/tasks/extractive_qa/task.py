"""The extractive question answering task: find the span of a text that answers a question."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.data.readers import TextReader
from brt.ops.spans import span_nats
from brt.tasks.encoders import EncoderTask
from brt.tasks.extractive_qa.evaluation import AnswerEvaluator
from brt.tasks.extractive_qa.preparation import QuestionPreparation
from brt.tasks.interface import Aux, LossInputs, count_scored
from brt.tasks.report import SCORE, Metric


class ExtractiveQa(EncoderTask):
    """The task of predicting the first and the last token of an answer within a context.

    The context is the text that contains the answer. A long context is cut into windows, and the
    model reads the question with one window at a time. In windows without the answer, both targets
    are token 0 of the input.
    """

    name = "extractive_qa"
    head, unsmoothed = "spans", "spans"
    sections = TASK_SECTIONS["extractive_qa"]
    data, preparation = "questions", QuestionPreparation
    row_reader, evaluator_class = TextReader, AnswerEvaluator
    metrics = (
        Metric("bits_per_place", "bits per place"),
        Metric("exact_match", "exact match %", ".2f"),
        Metric("f1", "F1 %", ".2f"),
    )
    table_metrics = (SCORE,)

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """Cross-entropy of two targets in each window: the answer's first and last token."""
        batch, logits = inputs.batch, self.training_logits(config, params, inputs)
        nats = jnp.sum(span_nats(logits, batch.targets, batch.scored))
        return nats, Aux(nats, count_scored(batch.scored))

    def next_steps(self, workdir: str) -> list[str]:
        what = "questions, in files of SQuAD's form"
        data = "Questions.train = 'mine.json'"
        return self.steps_with_own_data(workdir, what, "spans_quickstart.gin", data)
