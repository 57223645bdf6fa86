"""Accuracy and bits of the answers in memory tasks (`brt.data.memory_tasks`), by distance.

A document of a memory task states facts and later asks for the facts. The model predicts each token
of the document from the true tokens before it, as in other text. An answer is exact if the most
likely token is the correct one at each position of the answer. The distance of an answer is the
number of tokens between the fact and the answer.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from brt import output
from brt.config import Config
from brt.config.fields import MEMORY
from brt.data import memory_tasks
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.tasks.report import EXACT_ANSWERS, Metric

ANSWER_BITS = Metric("answer_bits_per_byte", "bits per byte of answers")


class AnswerSpan(NamedTuple):
    """The position of an answer in a document."""

    start: int  # index of the answer's first token
    stop: int  # index after the answer's last token
    distance: int  # number of tokens between the end of the stated fact and `start`
    bytes: int  # number of bytes of the answer's text


class ScoredAnswer(NamedTuple):
    """The score of an answer."""

    distance: int  # number of tokens between the end of the stated fact and the answer
    bytes: int  # number of bytes of the answer's text
    nats: float
    exact: bool  # True if every token of the answer was the most likely one


def answer_spans(store: TokenStore, tokenizer: Tokenizer) -> dict[int, list[AnswerSpan]]:
    """Returns the answers in each document of a memory task, by the index of the document.

    Other documents have no entry.
    """
    spans: dict[int, list[AnswerSpan]] = {}
    for document, name in enumerate(store.names):
        if not name.startswith(MEMORY):
            continue
        pieces = [tokenizer.decode_bytes(token[None]) for token in store.document(document)]
        ends = np.cumsum([len(piece) for piece in pieces])
        spans[document] = []
        for answer in memory_tasks.answers(name, b"".join(pieces)):
            byte_positions = (answer.start, answer.stop - 1, answer.stated - 1)
            start, last, told = (int(np.searchsorted(ends, b, "right")) for b in byte_positions)
            size = answer.stop - answer.start
            spans[document].append(AnswerSpan(start, last + 1, start - told - 1, size))
    return spans


class TokenScores:
    """Collects the scores of the tokens of documents batch by batch.

    `lengths` has the number of tokens of each document.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray):
        self._lengths = lengths
        self._blocks: list[list[np.ndarray]] = [[] for _ in lengths]

    def add(
        self,
        document: Int[np.ndarray, "B N"],
        nats: Float[np.ndarray, "B T"],
        right: Bool[np.ndarray, "B T"],
    ) -> None:
        """Adds the next segment of each of B rows.

        `document` has the index of the document of each of the N blocks of a segment, -1 for
        padding. All blocks of a document must come from the same row, in their order in the
        document. `right` is True for each token that was the most likely one.
        """
        blocks = np.stack([nats, right], axis=1).reshape(len(nats), 2, document.shape[1], -1)
        for row, block in np.argwhere(document >= 0):
            self._blocks[int(document[row, block])].append(blocks[row, :, block])

    def of(self, document: int) -> Float[np.ndarray, "2 T"]:
        """Returns the nats and `right` (see `add`) of the tokens of a document that were read."""
        parts = [np.zeros((2, 0)), *self._blocks[document]]
        return np.concatenate(parts, axis=1, dtype=np.float64)[:, : self._lengths[document]]


def scored_answers(
    spans: Mapping[int, Sequence[AnswerSpan]], scores: TokenScores, limit: int = 0
) -> list[ScoredAnswer]:
    """Returns the scores of all answers that were read to their end.

    `limit` is the number of tokens that were read of each document; 0 if all were read.
    """
    scored = []
    for document, answers in spans.items():
        nats, right = scores.of(document)
        for start, stop, distance, size in answers:
            if not limit or stop <= limit:
                exact = bool(right[start:stop].all())
                scored.append(ScoredAnswer(distance, size, float(nats[start:stop].sum()), exact))
    return scored


def answer_metrics(
    answers: Sequence[ScoredAnswer], window: int, bits: float, size: int
) -> dict[str, Any]:
    """Returns the metrics of answers, as JSON for a report.

    Most entries are about all answers together. The entry "answers" has the same metrics for each
    group of answers: those with distances of up to 1 window, from 1 to 2 windows, from 2 to 4
    windows, and so on. The entry "rest_bits_per_byte" is about the text outside of answers. `bits`
    and `size` are the total bits and bytes of the documents, including the answers. A size of 0
    means that the tokens do not reproduce the text; bits per byte are None then.
    """
    rows = defaultdict(list)
    for answer in answers:
        rows[1 << max(-(-answer.distance // window) - 1, 0).bit_length()].append(answer)
    answer_bits, answer_size = _bits(answers), sum(answer.bytes for answer in answers)
    return {
        **_metrics(answers),
        **({ANSWER_BITS.name: None} if not size else {}),
        "rest_bits_per_byte": (bits - answer_bits) / (size - answer_size) if size else None,
        "answers": [{"windows": windows, **_metrics(rows[windows])} for windows in sorted(rows)],
    }


def _metrics(answers: Sequence[ScoredAnswer]) -> dict[str, Any]:
    exact = 100 * sum(answer.exact for answer in answers) / len(answers) if answers else None
    size = sum(answer.bytes for answer in answers)
    return {
        "answers_read": len(answers),
        EXACT_ANSWERS.name: exact,
        ANSWER_BITS.name: _bits(answers) / size if answers else None,
    }


def _bits(answers: Sequence[ScoredAnswer]) -> float:
    return sum(answer.nats for answer in answers) / math.log(2)


def table_lines(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table of answers, or no lines if the reports contain no answers.

    `columns` has the metrics of each pass over the documents. The key "" is the pass of the
    unchanged model, and "without state", for example, is a pass in which the states were reset.
    """
    first, *_ = columns.values()
    if not first.get("answers"):
        return []
    heads = [f"exact, %{name and f', {name}'}" for name in columns]
    heads += [f"bits per byte{name and f', {name}'}" for name in columns]
    widths = [max(len(head), 8) + 2 for head in heads]
    lines = ["", _line("answers, by distance", "answers", heads, widths)]
    for number, row in enumerate(first["answers"]):
        windows = row["windows"]
        label = f"up to {windows} window{'s' if windows > 1 else ''}"
        lines.append(_row(label, [c["answers"][number] for c in columns.values()], widths))
    lines.append(_row("all", list(columns.values()), widths))
    bits = [column["rest_bits_per_byte"] for column in columns.values()]
    rest = ["-" if value is None else f"{value:.4f}" for value in bits]
    return [*lines, _line("the rest of the text", "", [""] * len(rest) + rest, widths)]


def _row(label: str, rows: Sequence[Mapping[str, Any]], widths: Sequence[int]) -> str:
    cells = [f"{row[EXACT_ANSWERS.name]:.2f}" for row in rows]
    cells += [f"{row[ANSWER_BITS.name]:.4f}" for row in rows]
    return _line(label, f"{rows[0]['answers_read']:,}", cells, widths)


def _line(label: str, count: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    return f"{label:22}{count:>8}" + "".join(f"{cell:>{width}}" for cell, width in pairs)


def draw(columns: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Returns a plot (PNG) of the share of exact answers; `columns` is as in `table_lines`."""
    from brt.drawing import distance_plot, png

    lines = {
        name or "as trained": {row["windows"]: row[EXACT_ANSWERS.name] for row in report["answers"]}
        for name, report in columns.items()
    }
    return png(distance_plot(lines, EXACT_ANSWERS.title))


def warn_of_cut_gradients(config: Config) -> None:
    """Warns on stderr if training segments are not longer than the distances of a memory task.

    The model cannot learn to remember over such distances, because no gradient crosses the start of
    a segment.
    """
    length = config.training.segment_length
    for source in config.data.train:
        if (
            source.startswith(MEMORY)
            and (far := max(memory_tasks.parse(source).distance)) >= length
        ):
            output.say(
                f"warning: {source} asks for facts from {far} bytes before, but gradients end at "
                f"the start of a segment of Training.segment_length = {length}, so the model "
                f"cannot learn to remember over this distance; set it above {far}"
            )
