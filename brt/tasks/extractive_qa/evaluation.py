"""Answers that a model finds in held-out texts."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Config
from brt.distributed import rules
from brt.ops.spans import best_spans, span_nats
from brt.tasks.encoders import EncoderTask, Timed
from brt.tasks.extractive_qa import squad
from brt.tasks.extractive_qa.data.batches import QuestionReader
from brt.tasks.extractive_qa.data.store import QuestionStore
from brt.tasks.heads import HeadEvaluator, HeadReading, columns
from brt.tasks.protocol import Dataset
from brt.types import TextBatch


class Window(NamedTuple):
    """What a model makes of one window.

    Attributes:
      start, end, score: of its best span.
      nothing: the logits of the first token, which stand for no answer.
      nats: -log p of start and end as training has them.
    """

    row: int
    start: int
    end: int
    score: float
    nothing: float
    nats: float


class AnswerEvaluator(HeadEvaluator):
    """Reads windows; a question's answer is the best of its windows'.

    Exact match and F1: SQuAD's, the best over a question's true answers, in percent of all
    questions, each once however many windows it has. Bits per place: -log2 p of start and end, over
    two places a window; of one that lacks the answer both are its first token. Windows that fill a
    batch and questions that were left out count nowhere.
    """

    summary = "exact_match", "exact match {:.2f} %"

    def __init__(
        self, task: EncoderTask, config: Config, dataset: Dataset, split: str,
        trained: Config | None = None, beside: bool = False,
    ):  # fmt: skip
        self._task, self._section = task, config.questions
        self._size = config.evaluation.batch_size
        super().__init__(config, dataset, split, trained, beside)

    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """The best span, the logits of no answer, and -log p as training has it."""
        longest = config.questions.max_answer_length

        def read(
            params: PyTree[Array], batch: TextBatch, inside: Bool[np.ndarray, "B T"] | Array
        ) -> tuple[Float[Array, " B"] | Int[Array, " B"], ...]:
            logits = self._task.predict(config, params, batch)
            nats = span_nats(logits, batch.targets, batch.scored).sum(axis=1)
            nothing = logits[:, 0].sum(axis=-1)
            return (*best_spans(logits, inside, longest), nothing, nats)

        return read

    def more(self, batch: TextBatch) -> tuple[np.ndarray, ...]:
        """Where in a window its text is."""
        return (self.store.inside(batch.row, batch.tokens.shape[1]),)

    def batches(self, limit: int) -> Iterator[TextBatch]:
        """See the base class."""
        return QuestionReader.evaluation(
            self.store, batch_size=rules.filled("lanes", self._size), limit=limit,
            buckets=self._section.buckets, max_length=self._section.max_length,
        )  # fmt: skip

    def reading(self, config: Config, found: dict[int, tuple], timed: Timed) -> HeadReading:
        """See the base class."""
        section, store = self._section, self.store
        windows: dict[int, list[Window]] = {}
        for row, outputs in found.items():
            window = Window(row, *(x.item() for x in outputs))
            windows.setdefault(int(store.rows[row, 0]), []).append(window)
        rows = []
        for question in sorted(windows):
            answer = merged(store, windows[question], section.no_answer, section.no_answer_margin)
            golds = store.answers[question]
            exact, f1 = squad.score(answer["prediction"], golds)
            asked = {"id": store.ids[question], "question": store.asked[question]}
            rows.append({**asked, **answer, "answers": golds, "exact_match": exact, "f1": f1})
        nats = sum(window.nats for own in windows.values() for window in own)
        figures = {
            "attention": config.attention.kind,
            **scores(rows),
            "windows": len(found),
            "bits_per_place": nats / math.log(2) / max(2 * len(found), 1),
            "left_out": store.manifest["rows"]["bad"],
            **timed.speed("tokens"),
        }
        figures |= {"score": figures["f1"], "score_name": "f1"}
        summary = f"exact match {figures['exact_match']:.2f} %, F1 {figures['f1']:.2f} %"
        return HeadReading(
            config.attention.kind, figures, summary, rows, [_shown(row) for row in rows]
        )

    def table(self, report: dict[str, Any], readings: list[HeadReading]) -> list[str]:
        """See the base class."""
        left_out = f" ({report['left_out']:,} left out)" if report["left_out"] else ""
        title = (
            f"{report['questions']:,} questions{left_out}, trained with {report['trained_with']}"
        )
        forms = {"exact_match": "{:.2f} %", "f1": "{:.2f} %", "bits_per_place": "{:.4f}"}
        return [f"{title} attention", "", *columns(report, readings, forms)]


def merged(
    store: QuestionStore, windows: list[Window], no_answer: bool, margin: float
) -> dict[str, Any]:
    """The answer of a question's windows: the best of their spans.

    "" where the windows' lowest logits of no answer are above that by more than the margin, as
    SQuAD 2.0's baselines have it: each window has to say that the answer is not there.
    """
    best = max(windows, key=lambda window: (window.score, -window.row))
    nothing = min(window.nothing for window in windows)
    text = store.text(best.row, best.start, best.end)
    given = {"prediction": text, "score": best.score}
    if not no_answer:
        return given
    if nothing - best.score > margin:
        given["prediction"] = ""
    return {**given, "no_answer_score": nothing}


def scores(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentages; of questions with and without an answer apart where there are both."""
    kinds = {"": rows, "answerable_": [r for r in rows if r["answers"]]}
    if len(kinds["answerable_"]) == len(rows):
        kinds.pop("answerable_")
    else:
        kinds["unanswerable_"] = [r for r in rows if not r["answers"]]
    found: dict[str, Any] = {"questions": len(rows)}
    for kind, own in kinds.items():
        for name in ("exact_match", "f1"):
            found[kind + name] = 100 * sum(row[name] for row in own) / max(len(own), 1)
    return found


def _shown(row: dict[str, Any]) -> str:
    golds = " | ".join(dict.fromkeys(row["answers"])) or "(none)"
    found = row["prediction"] or "(none)"
    return f"{row['id']}: {row['question']}\n  is:    {golds}\n  found: {found}"
