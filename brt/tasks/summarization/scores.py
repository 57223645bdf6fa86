"""From written summaries to a report: scores with their protocol, lengths, what was cut off."""

import textwrap
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np

from brt.formatting import counted
from brt.tasks.summarization.rouge import Aggregate, Protocol, Score, aggregate
from brt.tasks.summarization.rouge.aggregation import TEXT

_WIDTH, _LINES = 46, 12  # of each of two columns, in characters; of an example


class Summary(NamedTuple):
    """What was written for one document.

    Attributes:
      id: of the document, as its source names it.
      source: the whole document.
      reference: its summary.
      prediction: what the model wrote; "" is allowed.
      source_tokens: of the whole document, what was cut off included.
      cut_tokens: how many of them the model did not read.
      prediction_tokens: that the model wrote, without the start and the end.
    """

    id: str
    source: str
    reference: str
    prediction: str
    source_tokens: int
    cut_tokens: int
    prediction_tokens: int


class ScoredSummaries(NamedTuple):
    """Scores of all documents.

    Attributes:
      summaries: as given.
      protocol: that they were scored with.
      scores: of each, by name; shares in [0, 1].
      report: as JSON, percentages; see `score`.
    """

    summaries: list[Summary]
    protocol: Protocol
    scores: list[dict[str, Score]]
    report: dict[str, Any]


def score(summaries: Sequence[Summary], protocol: Protocol) -> ScoredSummaries:
    """Scores summaries.

    The report has `documents`; `rouge`, by name the mean `precision`, `recall` and `f1` with the
    bounds `low` and `high` of the latter; `protocol`; `truncation`; `lengths`, by what is
    counted; `empty`, `distinct` and `copied_bigrams` of the predictions. Scores and shares are
    percentages.

    Raises:
      DataError: there are no summaries.
    """
    summaries = list(summaries)
    scores = [protocol.score(s.reference, s.prediction) for s in summaries]
    report = {
        "documents": len(summaries),
        "rouge": {name: _figures(found) for name, found in aggregate(scores).items()},
        "protocol": {"name": protocol.name, "rouge": protocol.text, "aggregation": TEXT},
        "truncation": _truncation(summaries),
        "lengths": _lengths(summaries),
        "empty": sum(not s.prediction.strip() for s in summaries),
        "distinct": len({s.prediction for s in summaries}),
        "copied_bigrams": _copied_bigrams(summaries, protocol),
    }
    return ScoredSummaries(summaries, protocol, scores, report)


def rows(scored: ScoredSummaries) -> list[dict[str, Any]]:
    """Every summary with its scores, as JSON."""
    return [
        {
            "id": summary.id,
            "prediction": summary.prediction,
            "reference": summary.reference,
            "rouge_protocol": scored.protocol.name,
            **{name: _percentages(found) for name, found in scores.items()},
            "source_tokens": summary.source_tokens,
            "cut_tokens": summary.cut_tokens,
            "prediction_tokens": summary.prediction_tokens,
        }
        for summary, scores in zip(scored.summaries, scored.scores, strict=True)
    ]


def text(scored: ScoredSummaries) -> str:
    """The report as people read it: scores with their protocol, lengths, three summaries.

    The three are the first, the middle and the last document's, whatever their scores.
    """
    report, name = scored.report, scored.protocol.name
    cut, lengths = report["truncation"], report["lengths"]
    written, words, reference = (
        lengths[what]["mean"] for what in ("prediction_tokens", "prediction_words",
                                           "reference_words")
    )  # fmt: skip
    copied = report["copied_bigrams"]
    documents = counted(report["documents"], "document")
    lines = [f"{documents}; {report['protocol']['rouge']};", TEXT, ""]
    lines += [
        f"{rouge:<9} ({name})  F1 {f['f1']:6.2f}  [{f['low']:.2f}, {f['high']:.2f}]   "
        f"precision {f['precision']:6.2f}  recall {f['recall']:6.2f}"
        for rouge, f in report["rouge"].items()
    ]
    lines += [
        "",
        f"sources: {lengths['source_tokens']['mean']:,.0f} tokens on average; {cut['documents']:,} "
        f"were cut ({cut['documents_percent']:.1f} %), {cut['tokens_percent']:.1f} % of all tokens "
        f"were not read",
        f"summaries: {written:,.1f} tokens, {words:,.1f} words on average, references "
        f"{reference:,.1f} words; {report['empty']:,} empty, {report['distinct']:,} distinct; "
        + (f"{copied:.1f} % of word pairs" if copied is not None else "no word pairs")
        + " are in the source",
    ]
    count = len(scored.summaries)
    for index in sorted({0, count // 2, count - 1}):
        lines += ["", *_example(scored, index)]
    return "\n".join(lines)


def _percentages(found: Score) -> dict[str, int | float]:
    return {key: 100 * value for key, value in found._asdict().items()}


def _figures(found: Aggregate) -> dict[str, int | float]:
    bounds = {"low": 100 * found.low.f1, "high": 100 * found.high.f1}
    return {**_percentages(found.mid), **bounds}


def _truncation(summaries: Sequence[Summary]) -> dict[str, int | float]:
    documents = sum(s.cut_tokens > 0 for s in summaries)
    tokens = sum(s.cut_tokens for s in summaries)
    total = sum(s.source_tokens for s in summaries)
    return {
        "documents": documents,
        "documents_percent": 100 * documents / len(summaries),
        "tokens": tokens,
        "tokens_percent": 100 * tokens / max(total, 1),
    }


def _lengths(summaries: Sequence[Summary]) -> dict[str, dict[str, int | float]]:
    """Words are what white space separates."""
    counts = {
        "source_tokens": [s.source_tokens for s in summaries],
        "source_words": [len(s.source.split()) for s in summaries],
        "reference_words": [len(s.reference.split()) for s in summaries],
        "prediction_words": [len(s.prediction.split()) for s in summaries],
        "prediction_tokens": [s.prediction_tokens for s in summaries],
    }
    return {
        what: {
            "mean": float(np.mean(values)),
            "median": float(np.median(values)),
            "min": min(values),
            "max": max(values),
        }
        for what, values in counts.items()
    }


def _copied_bigrams(summaries: Sequence[Summary], protocol: Protocol) -> float | None:
    """Percentage of the predictions' pairs of words that are in their sources; None: no pairs."""
    copied = total = 0
    for summary in summaries:
        words, source = map(protocol.words, (summary.prediction, summary.source))
        pairs, known = list(pairwise(words)), set(pairwise(source))
        copied += sum(pair in known for pair in pairs)
        total += len(pairs)
    return 100 * copied / total if total else None


def _example(scored: ScoredSummaries, index: int) -> list[str]:
    """The reference and the summary in two columns."""
    summary, scores = scored.summaries[index], scored.scores[index]
    figures = ", ".join(f"{name} {100 * s.f1:.1f}" for name, s in scores.items())
    columns = [
        textwrap.wrap(" ".join(words.split()), _WIDTH, max_lines=_LINES, placeholder=" ...")
        for words in (summary.reference, summary.prediction or "(nothing)")
    ]
    return [
        f"{summary.id}: {figures} ({scored.protocol.name})",
        f"{'reference':<{_WIDTH}} | summary",
        *(f"{a:<{_WIDTH}} | {b}".rstrip() for a, b in zip_longest(*columns, fillvalue="")),
    ]
