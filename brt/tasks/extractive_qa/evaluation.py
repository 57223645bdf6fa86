"""Evaluation of extractive question answering: exact match and F1 of predicted answers.

Long texts are cut into windows. A model reads the question together with one window of the text,
and predicts the span of tokens of the window that is the answer; not every window contains it. In
shapes, B is the number of windows in a batch and T their padded number of tokens.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Config
from brt.ops.spans import best_spans, span_nats
from brt.tasks.arguments import EvaluationRequest
from brt.tasks.encoders import EncoderTask, TimedFunction
from brt.tasks.extractive_qa import squad
from brt.tasks.extractive_qa.data.batches import QuestionReader
from brt.tasks.extractive_qa.data.store import QuestionStore
from brt.tasks.heads import HeadEvaluator, HeadResult, metric_table
from brt.types import TextBatch


class WindowPrediction(NamedTuple):
    """A model's prediction for one window.

    Attributes:
      row: index of the window in the store.
      start, end: positions of the first and last token of the best span in the window's input.
      score: score of the best span, the sum of the logits of its start and end.
      no_answer: sum of the start and end logits of the input's first token, which stands for "no
        answer in this window".
      nats: cross-entropy of the true start plus cross-entropy of the true end, as in training.
    """

    row: int
    start: int
    end: int
    score: float
    no_answer: float
    nats: float


class AnswerEvaluator(HeadEvaluator):
    """Evaluates question answering; the answer to a question is the best answer of its windows.

    Exact match and F1 are defined as for SQuAD: for each question the maximum over its true
    answers, in percent, averaged over questions. A window has two places to predict, the first and
    the last token of the answer; in a window without the answer, both places are the first token of
    the input. Bits per place are -log2 p of the true places, averaged over the places of all
    windows. Rows that only fill up a batch do not count, and neither do questions that were left
    out when the data were prepared.
    """

    compared_metric = "exact_match", "exact match {:.2f} %"

    def __init__(self, task: EncoderTask, request: EvaluationRequest):
        super().__init__(task, request)
        self._section = request.config.questions

    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """Returns the function that is compiled and evaluated for each batch.

        The function's arguments are the parameters, a batch, and a mask that is True for tokens of
        the context. Its results are the fields of WindowPrediction except for `row`, arrays [B].
        `config` is the config of the model, with the longest answer that may be predicted.
        """
        longest = config.questions.max_answer_length

        def read(
            params: PyTree[Array], batch: TextBatch, mask: Bool[np.ndarray, "B T"] | Array
        ) -> tuple[Float[Array, " B"] | Int[Array, " B"], ...]:
            """Returns the fields start, end, score, no_answer and nats of WindowPrediction for each
            window of the batch, as arrays [B].

            Args:
              params: parameters of the model.
              batch: a batch of windows.
              mask: True for tokens of the context, the only tokens that an answer may contain.
            """
            logits = self.task.predict(config, params, batch)
            nats = span_nats(logits, batch.targets, batch.scored).sum(axis=1)
            no_answer = logits[:, 0].sum(axis=-1)
            return (*best_spans(logits, mask, longest), no_answer, nats)

        return read

    def extra_inputs(self, batch: TextBatch) -> tuple[np.ndarray, ...]:
        """Returns a tuple with one mask, bool [B, T]: True for the tokens that an answer may
        contain, which are the tokens of the context.

        The function that `forward` returns takes this mask as its last argument.
        """
        return (self.store.context_mask(batch.row, batch.tokens.shape[1]),)

    def batches(self, limit: int) -> Iterator[TextBatch]:
        """Yields batches of all windows, or if `limit` is above 0, a single batch of at most this
        number of windows from the start of the split.
        """
        return QuestionReader.evaluation(
            self.store, batch_size=self.batch_size, limit=limit,
            buckets=self._section.buckets, max_length=self._section.max_length,
        )  # fmt: skip

    def summarize(
        self, config: Config, outputs: dict[int, tuple], timed: TimedFunction
    ) -> HeadResult:
        """Returns the metrics of the split, and one prediction for each question.

        Args:
          config: config of the model.
          outputs: for each window, by its index, the results of the function that `forward`
            returns.
          timed: the function that `forward` returns, in an object that has recorded the number of
            inputs and the time of the function's calls.
        """
        section, store = self._section, self.store
        windows: dict[int, list[WindowPrediction]] = {}
        for row, arrays in outputs.items():
            window = WindowPrediction(row, *(x.item() for x in arrays))
            windows.setdefault(int(store.rows[row, 0]), []).append(window)
        rows = []
        for question in sorted(windows):
            answer = best_answer(
                store, windows[question], section.no_answer, section.no_answer_margin
            )
            golds = store.answers[question]
            exact, f1 = squad.score(answer["prediction"], golds)
            asked = {"id": store.ids[question], "question": store.asked[question]}
            rows.append({**asked, **answer, "answers": golds, "exact_match": exact, "f1": f1})
        nats = sum(window.nats for group in windows.values() for window in group)
        metrics = {
            "attention": config.attention.kind,
            **average_scores(rows),
            "windows": len(outputs),
            "bits_per_place": nats / math.log(2) / max(2 * len(outputs), 1),
            "left_out": store.manifest["rows"]["bad"],
            **timed.speed("tokens"),
        }
        metrics |= {"score": metrics["f1"], "score_name": "f1"}
        summary = f"exact match {metrics['exact_match']:.2f} %, F1 {metrics['f1']:.2f} %"
        return HeadResult(
            config.attention.kind, metrics, summary, rows, [_shown(row) for row in rows]
        )

    def table(self, report: dict[str, Any], results: list[HeadResult]) -> list[str]:
        """Returns the lines of a table of metrics, with a row for each kind of attention.

        Args:
          report: the report of the whole evaluation, as JSON.
          results: the result of each kind of attention.
        """
        left_out = f" ({report['left_out']:,} left out)" if report["left_out"] else ""
        title = (
            f"{report['questions']:,} questions{left_out}, trained with {report['trained_with']}"
        )
        forms = {"exact_match": "{:.2f} %", "f1": "{:.2f} %", "bits_per_place": "{:.4f}"}
        return [f"{title} attention", "", *metric_table(report, results, forms)]


def best_answer(
    store: QuestionStore, windows: list[WindowPrediction], no_answer: bool, margin: float
) -> dict[str, Any]:
    """Returns the prediction for a question: the best answer in the windows of its context.

    As in the baselines of SQuAD 2.0, the prediction is "" (no answer) only if the no-answer scores
    of all windows exceed the score of the best span by more than `margin`.

    Args:
      store: the questions and contexts of the split.
      windows: the model's predictions for all windows of the question.
      no_answer: True if the prediction may be "".
      margin: the number by which the no-answer scores have to exceed the score of the best span.

    Returns:
      JSON with the keys "prediction" (the text of the answer) and "score" (of the best span). If
      `no_answer` is True, "no_answer_score" is the lowest no-answer score of the windows.
    """
    best = max(windows, key=lambda window: (window.score, -window.row))
    no_answer_score = min(window.no_answer for window in windows)
    text = store.text(best.row, best.start, best.end)
    answer = {"prediction": text, "score": best.score}
    if not no_answer:
        return answer
    if no_answer_score - best.score > margin:
        answer["prediction"] = ""
    return {**answer, "no_answer_score": no_answer_score}


def average_scores(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the averages of exact match and F1 over questions, in percent, by name.

    The names are "exact_match" and "f1"; "questions" is the number of questions. If some questions
    have no answer, there are also averages over the questions with an answer, whose names begin
    with "answerable_", and over the questions without an answer ("unanswerable_").

    Args:
      rows: for each question, JSON with the keys "answers" (the true answers), "exact_match" and
        "f1" (of the prediction, from 0 to 1).
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
