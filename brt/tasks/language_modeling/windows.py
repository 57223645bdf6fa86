"""Evaluates one model with several windows, to measure how much a longer context helps.

With each window, every document is read from its start to its end, and every token is scored. The
differences between windows are therefore paired by document. The difference between a small window
and the largest one shows how much a memory could improve a model with the small window.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from brt.config import Config
from brt.config.checks import check
from brt.formatting import counted
from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest
from brt.tasks.differences import basis, paired_difference, position_ranges
from brt.tasks.language_modeling import evaluation
from brt.tasks.language_modeling.evaluation import DocumentEvaluator, SplitScores
from brt.tasks.report import BITS_PER_BYTE, BITS_PER_TOKEN, EvaluationResult
from brt.types import Variables

# Documents are padded to a whole number of blocks. To keep this padding small, a block has at most
# this number of tokens, however long the windows are.
_LONGEST_BLOCK = 256


class WindowEvaluator:
    """Evaluates one model with several windows; every document is read from start to end.

    The windows replace Model.window. Layers to which Window.by_layer assigns another window keep
    the window of Window.by_layer.
    """

    unit, partial = "tok", False

    def __init__(self, request: EvaluationRequest):
        self._config, self.windows = request.config, tuple(sorted(set(request.windows)))
        check(
            request.ablate is None,
            f"--windows and --ablate={request.ablate} are two measurements; leave one of them out",
        )
        block = math.gcd(*self.windows, _LONGEST_BLOCK)
        self._block = block if block >= 16 else min(*self.windows, _LONGEST_BLOCK)
        self._evaluators = [
            DocumentEvaluator(request._replace(config=_with_window(self._config, w, self._block)))
            for w in self.windows
        ]
        self._store = evaluation.documents(self._config, request.dataset, request.split)
        self._edges = [0, *self.windows]  # the first positions of the reported ranges
        self.total = sum(evaluator.total for evaluator in self._evaluators)

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        scores, positions = [], []
        for evaluator in self._evaluators:
            result = evaluator.read(variables, control, keep_tokens=True)
            if result is None:
                return None
            scores.append(dataclasses.replace(result, tokens=()))
            positions.append(sums_by_position(result.tokens, self._edges))
        return self._result(scores, np.asarray(positions))

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns the sample of the model with the largest window."""
        return self._evaluators[-1].sample(variables, step, control)

    def _result(self, scores: Sequence[SplitScores], positions: np.ndarray) -> EvaluationResult:
        largest = scores[-1]
        sizes = np.asarray([score.bytes for score in largest.documents])
        nats = np.asarray([[score.nats for score in reading.documents] for reading in scores])
        counts = sums_by_position(map(self._store.mask, range(len(self._store))), self._edges)
        tokens = counts.astype(int)
        rows = []
        for window, reading, own, by_position in zip(
            self.windows, scores, nats, positions, strict=True
        ):
            difference = paired_difference(own, nats[-1], sizes)
            bits = by_position / math.log(2) / np.maximum(tokens, 1)
            rows.append({
                "window": window,
                **reading.totals,
                "difference": difference.value,
                "difference_95": difference.half_width,
                "bits_per_token_by_position": [
                    float(b) if n else None for b, n in zip(bits, tokens, strict=True)
                ],
            })  # fmt: skip
        report = {
            **largest.totals,
            "protocol": {**largest.protocol, "window": self.windows[-1],
                         "sinks": self._config.model.sliding.sinks, "block": self._block},
            "windows": rows,
            "positions": {"from": self._edges, "tokens": tokens.tolist()},
        }  # fmt: skip
        documents = [
            {
                "document": score.name,
                "bytes": score.bytes,
                **{f"nats_{w}": float(own[i]) for w, own in zip(self.windows, nats, strict=True)},
            }
            for i, score in enumerate(largest.documents)
        ]
        worth = rows[0]["difference"]
        summary = (
            f"a window of {self.windows[-1]:,} instead of {self.windows[0]:,} tokens is worth "
            f"{worth:.4f} bits/byte"
        )
        draw = partial(_draw, rows) if self._config.training.plots else None
        return EvaluationResult(
            report, summary, {"documents": documents}, text(report), name="_windows", draw=draw
        )


def sums_by_position(documents: Iterable[np.ndarray], edges: Sequence[int]) -> np.ndarray:
    """Returns, for each range of positions, the sum of the values there over all documents.

    Each of `documents` has a value for each token. `edges` has the first position of each range,
    ascending, beginning with 0.
    """
    sums = np.zeros(len(edges))
    for values in documents:
        sums += np.bincount(position_ranges(edges, len(values)), values, len(edges))
    return sums


def _with_window(config: Config, window: int, block: int) -> Config:
    sliding = dataclasses.replace(config.model.sliding, block=block)
    model = dataclasses.replace(config.model, window=window, sliding=sliding)
    length = block * max(1, max(config.evaluation_segment_length, window) // block)
    evaluation = dataclasses.replace(config.evaluation, segment_length=length)
    return dataclasses.replace(config, model=model, evaluation=evaluation)


def text(report: Mapping[str, Any]) -> str:
    """Returns the report as text for people: a row for each window."""
    protocol, rows = report["protocol"], report["windows"]
    per_byte = report["bits_per_byte"] is not None
    lines = [
        f"{counted(report['documents'], 'document')}, {report['tokens']:,} tokens, "
        f"{report['bytes']:,} bytes",
        f"every token scored with each window, {protocol['sinks']} sinks, "
        f"{evaluation.which(protocol)}, {evaluation.clause(protocol)}"
        f"tokenizer {protocol['tokenizer']}",
        basis(report["documents"]),
        "",
        f"{'window':>8}{'bits per byte' if per_byte else 'bits per token':>16}"
        f"{'more than the largest':>24}{'95 % interval':>24}",
    ]
    name = "bits_per_byte" if per_byte else "bits_per_token"
    for row in rows:
        half, value = row["difference_95"], row["difference"]
        interval = "one document" if half is None else f"{value - half:.4f} to {value + half:.4f}"
        lines.append(
            f"{row['window']:>8,}{row[name]:>16.4f}{value:>24.4f}"
            f"{'' if row is rows[-1] else interval:>24}"
        )
    return "\n".join([*lines, "", *_position_lines(report)])


def _position_lines(report: Mapping[str, Any]) -> list[str]:
    starts, tokens = report["positions"]["from"], report["positions"]["tokens"]
    windows = [row["window"] for row in report["windows"]]
    lines = [
        "bits per token by the position in the document",
        f"{'from token':>12}{'tokens':>12}" + "".join(f"{w:>10,}" for w in windows),
    ]
    for i, (start, count) in enumerate(zip(starts, tokens, strict=True)):
        if count:
            cells = [row["bits_per_token_by_position"][i] for row in report["windows"]]
            lines.append(f"{start:>12,}{count:>12,}" + "".join(f"{c:>10.4f}" for c in cells))
    return lines


def _draw(rows: Sequence[Mapping[str, Any]]) -> bytes:
    from brt.drawing import png, window_plot

    metric = BITS_PER_TOKEN if rows[0]["bits_per_byte"] is None else BITS_PER_BYTE
    return png(window_plot({row["window"]: row[metric.name] for row in rows}, metric.title))
