"""The extractive question answering task: find the span of a text that answers a question.

Long texts are cut into windows. A model reads the question together with one window of the text,
and predicts which span of the window's tokens is the answer. Not every window contains the answer.
In shapes, B is the number of windows in a batch and T their padded number of tokens.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.data.readers import TextReader
from brt.ops.spans import best_spans, span_nats
from brt.tasks.encoders import EncoderTask, HeadEvaluator, HeadResult
from brt.tasks.extractive_qa import squad
from brt.tasks.extractive_qa.preparation import QuestionPreparation, QuestionStore
from brt.tasks.interface import Aux, LossInputs, count_scored
from brt.tasks.report import SCORE, Metric
from brt.types import TextBatch


class WindowPrediction(NamedTuple):
    """A model's prediction for one window."""

    row: int  # index of the window in the store
    start: int  # position of the best span's first token in the window's input
    end: int  # position of the best span's last token in the window's input
    score: float  # score of the best span: the logit of its start plus the logit of its end
    # Sum of the start and end logits of the input's first token, which stands for "no answer in
    # this window".
    no_answer: float
    nats: float  # cross-entropy of the true start plus that of the true end, as in training


class AnswerEvaluator(HeadEvaluator):
    """Evaluates question answering. The answer to a question is the best answer in its windows.

    Exact match and F1 are defined as for SQuAD. The score of a question is the highest score that
    its prediction reaches against one of the true answers. The metrics are averages over questions,
    in percent. A window has two places to predict, the first and the last token of the answer. Bits
    per place are -log2 p of the true places, averaged over the places of all windows. Questions
    that were left out when the data were prepared do not count.
    """

    compared_metric = "exact_match", "exact match {:.2f} %"
    rows = "questions", "questions"
    forms = {"exact_match": "{:.2f} %", "f1": "{:.2f} %", "bits_per_place": "{:.4f}"}

    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """Returns a function of the parameters, a batch and a mask (`QuestionStore.context_mask`).

        The function returns the fields of `WindowPrediction`, except for `row`, as arrays [B].
        """
        longest = config.questions.max_answer_length

        def read(
            params: PyTree[Array], batch: TextBatch, mask: Bool[np.ndarray, "B T"] | Array
        ) -> tuple[Float[Array, " B"] | Int[Array, " B"], ...]:
            logits = self.task.predict(config, params, batch)
            nats = span_nats(logits, batch.targets, batch.scored).sum(axis=1)
            no_answer = logits[:, 0].sum(axis=-1)
            return (*best_spans(logits, mask, longest), no_answer, nats)

        return read

    def extra_inputs(self, batch: TextBatch) -> tuple[np.ndarray, ...]:
        return (self.store.context_mask(batch.row, batch.tokens.shape[1]),)

    def summarize(self, outputs: dict[int, tuple], seconds: float) -> HeadResult:
        section, store = self.section, self.store
        windows: dict[int, list[WindowPrediction]] = {}
        for row, arrays in outputs.items():
            window = WindowPrediction(row, *(x.item() for x in arrays))
            windows.setdefault(int(store.rows[row, 0]), []).append(window)
        rows = []
        for question in sorted(windows):
            answer = best_answer(store, windows[question], section.no_answer)
            golds = store.answers[question]
            exact, f1 = squad.score(answer["prediction"], golds)
            asked = {"id": store.ids[question], "question": store.asked[question]}
            rows.append({**asked, **answer, "answers": golds, "exact_match": exact, "f1": f1})
        nats = sum(window.nats for group in windows.values() for window in group)
        metrics = {
            **average_scores(rows),
            "windows": len(outputs),
            "bits_per_place": nats / math.log(2) / max(2 * len(outputs), 1),
        }
        metrics |= {"score": metrics["f1"], "score_name": "f1"}
        summary = f"exact match {metrics['exact_match']:.2f} %, F1 {metrics['f1']:.2f} %"
        return HeadResult(metrics, summary, rows, [_shown(row) for row in rows])


def best_answer(
    store: QuestionStore, windows: list[WindowPrediction], no_answer: bool
) -> dict[str, Any]:
    """Returns the prediction for a question: the best answer in the windows of its context.

    If `no_answer` is True, the prediction may be "" (no answer). As in the baselines of SQuAD 2.0,
    it is "" if the no-answer score of every window exceeds the score of the best span.
    """
    best = max(windows, key=lambda window: (window.score, -window.row))
    no_answer_score = min(window.no_answer for window in windows)
    text = store.text(best.row, best.start, best.end)
    answer = {"prediction": text, "score": best.score}
    if not no_answer:
        return answer
    if no_answer_score - best.score > 0:
        answer["prediction"] = ""
    return {**answer, "no_answer_score": no_answer_score}


def average_scores(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the averages of exact match and F1 over questions, in percent, by name.

    Each of `rows` is a question with scores from 0 to 1. If some questions have no answer, there
    are also averages over two groups of questions. Names that begin with "answerable_" are averages
    over questions with an answer. Names that begin with "unanswerable_" are averages over questions
    without an answer.
    """
    kinds = {"": rows, "answerable_": [r for r in rows if r["answers"]]}
    if len(kinds["answerable_"]) == len(rows):
        kinds.pop("answerable_")
    else:
        kinds["unanswerable_"] = [r for r in rows if not r["answers"]]
    averages: dict[str, Any] = {"questions": len(rows)}
    for kind, group in kinds.items():
        for name in ("exact_match", "f1"):
            averages[kind + name] = 100 * sum(row[name] for row in group) / max(len(group), 1)
    return averages


def _shown(row: dict[str, Any]) -> str:
    golds = " | ".join(dict.fromkeys(row["answers"])) or "(none)"
    prediction = row["prediction"] or "(none)"
    return f"{row['id']}: {row['question']}\n  is:    {golds}\n  found: {prediction}"


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
        """The loss is the sum of the cross-entropies of the answer's first and last token."""
        batch = inputs.batch
        logits = self.predict(config, params, batch, inputs.key)
        nats = jnp.sum(span_nats(logits, batch.targets, batch.scored))
        return nats, Aux(nats, count_scored(batch.scored))

    def next_steps(self, workdir: str) -> list[str]:
        what = "questions, in files of SQuAD's form"
        return self.steps_with_own_data(workdir, what, "spans_quickstart.gin", "mine.json")
