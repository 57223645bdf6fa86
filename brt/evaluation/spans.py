"""Answers that a model finds in held-out texts."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from brt.config import Config
from brt.data.questions.batches import QuestionReader
from brt.data.questions.store import QuestionStore
from brt.evaluation import squad
from brt.evaluation.heads import Reading, Timed, some
from brt.ops.spans import Spans, best_spans, span_nats
from brt.training.objectives.encoders import network
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


class Answerer:
    """Reads stores; compiled once for each padded length."""

    def __init__(self, config: Config):
        self._config = config
        longest = config.questions.max_answer_length

        def read(
            params: PyTree[Array], batch: TextBatch, inside: Bool[np.ndarray, "B T"] | Array
        ) -> tuple[Spans, Float[Array, " B"], Float[Array, " B"]]:
            key = jax.random.key(0)  # of what attention draws: always the same
            logits = network(config).apply({"params": params}, batch.tokens, batch.valid, key)
            nats = span_nats(logits, batch.targets, batch.scored).sum(axis=1)
            # An empty row's logits are the lowest numbers there are, whose sum is no number.
            nothing = jax.numpy.where(batch.scored[:, 0], logits[:, 0].sum(axis=-1), 0.0)
            return best_spans(logits, inside, longest), nothing, nats

        self._read = Timed(read)

    def __call__(
        self,
        params: PyTree[Array],
        store: QuestionStore,
        *,
        limit: int = 0,
        stop: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda count: None,
    ) -> Reading | None:
        """The answers to a store's questions; None if asked to stop on the way.

        Args:
          limit: only the first so many windows, as one batch; 0: all.
          progress: called with the number of windows done since the last call.
        """
        self._read.restart()
        found: dict[int, list[Window]] = {}
        section = self._config.questions
        reader = QuestionReader(
            store=store, batch_size=self._config.evaluation.batch_size, buckets=section.buckets,
            max_length=section.max_length, shuffle=False,
        )  # fmt: skip
        for batch in reader.once(limit):
            if stop():
                return None
            inside = store.inside(batch.row, batch.tokens.shape[1])
            spans, nothing, nats = self._read(params, batch, inside)
            for i in np.flatnonzero(batch.row >= 0):
                row = int(batch.row[i])
                window = Window(row, *(x[i].item() for x in (*spans, nothing, nats)))
                found.setdefault(int(store.rows[row, 0]), []).append(window)
            progress(int((batch.row >= 0).sum()))
        return self._reading(store, found)

    def _reading(self, store: QuestionStore, found: dict[int, list[Window]]) -> Reading:
        section = self._config.questions
        rows = []
        for question in sorted(found):
            answer = merged(store, found[question], section.no_answer, section.no_answer_margin)
            golds = store.answers[question]
            exact, f1 = squad.score(answer["prediction"], golds)
            asked = {"id": store.ids[question], "question": store.asked[question]}
            rows.append({**asked, **answer, "answers": golds, "exact_match": exact, "f1": f1})
        windows = [window for own in found.values() for window in own]
        nats = sum(window.nats for window in windows)
        figures = {
            "attention": self._config.attention.kind,
            **scores(rows),
            "windows": len(windows),
            "bits_per_place": nats / math.log(2) / max(2 * len(windows), 1),
            "left_out": store.manifest["rows"]["bad"],
            **self._read.figures(),
        }
        headline = f"exact match {figures['exact_match']:.2f} %, F1 {figures['f1']:.2f} %"
        shown = [_shown(rows[place]) for place in some(len(rows))]
        return Reading(self._config.attention.kind, figures, headline, rows, shown)


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
