"""Scores generated summaries with ROUGE, and reports scores, lengths and truncation."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np

from brt.formatting import counted
from brt.tasks.report import example_indices
from brt.tasks.rouge import TEXT, RougeProtocol, Score, aggregate

# The report shows examples in two columns. A column has this width in characters, and at most this
# number of lines.
_WIDTH, _LINES = 46, 12


class Summary(NamedTuple):
    """A generated summary of one document."""

    id: str
    # The document as the model reads it: with Pairs.prefix before it, and without parts that were
    # cut off.
    source: str
    reference: str  # reference summary, which was not cut
    prediction: str  # generated summary, which may be empty
    source_tokens: int  # number of tokens of the whole document, with those that were cut off
    cut_tokens: int  # number of tokens of the document that were cut off
    prediction_tokens: int  # number of generated tokens, without start and end tokens


class ScoredSummaries(NamedTuple):
    """The generated summaries of a split, with their ROUGE scores."""

    summaries: list[Summary]
    protocol: RougeProtocol
    scores: list[dict[str, Score]]  # each summary's scores, in [0, 1], by name ("rougeL")
    report: dict[str, Any]  # metrics of all summaries as JSON; see `score_summaries`


def score_summaries(summaries: Sequence[Summary], protocol: RougeProtocol) -> ScoredSummaries:
    """Computes the ROUGE scores of generated summaries, and a report about all of them.

    The report has these entries; scores and shares are percentages:

        documents                        number of documents
        rouge                            for each score, the means `precision`, `recall` and `f1`,
                                         and the confidence interval `low` to `high` of the F1
        protocol                         the definition of the scores
        truncation                       numbers and shares of the documents that were cut and of
                                         the tokens that were cut off
        lengths                          mean, median, minimum and maximum of the lengths of
                                         documents, references and predictions
        exact                            share of the predictions that equal the reference apart
                                         from white space at the ends
        empty, distinct                  numbers of empty and of distinct predictions
        copied_bigrams                   share of the predictions' bigrams that occur in the part of
                                         the document that the model read
    """
    summaries = list(summaries)
    scores = [protocol.score(s.reference, s.prediction) for s in summaries]
    report = {
        "documents": len(summaries),
        "rouge": aggregate(scores),
        "protocol": {"name": protocol.name, "rouge": protocol.text, "aggregation": TEXT},
        "truncation": _truncation(summaries),
        "lengths": _lengths(summaries),
        "exact": 100 * sum(map(_is_exact, summaries)) / len(summaries),
        "empty": sum(not s.prediction.strip() for s in summaries),
        "distinct": len({s.prediction for s in summaries}),
        "copied_bigrams": _copied_bigrams(summaries, protocol),
    }
    return ScoredSummaries(summaries, protocol, scores, report)


def f1_scores(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the F1 of each ROUGE score of a report, by name; {} if nothing was generated."""
    return {name: score["f1"] for name, score in report.get("rouge", {}).items()}


def rows(scored: ScoredSummaries) -> list[dict[str, Any]]:
    """Returns a JSON object for each summary, for a file of predictions; scores are in percent."""
    return [
        {
            "id": summary.id,
            "prediction": summary.prediction,
            "reference": summary.reference,
            "rouge_protocol": scored.protocol.name,
            **{name: score.percentages() for name, score in scores.items()},
            "source_tokens": summary.source_tokens,
            "cut_tokens": summary.cut_tokens,
            "prediction_tokens": summary.prediction_tokens,
        }
        for summary, scores in zip(scored.summaries, scored.scores, strict=True)
    ]


def text(scored: ScoredSummaries) -> str:
    """Returns the report for people: scores, lengths, and the first, middle and last summary."""
    report, name = scored.report, scored.protocol.name
    cut, lengths = report["truncation"], report["lengths"]
    written, words, reference = (
        lengths[unit]["mean"]
        for unit in ("prediction_tokens", "prediction_words", "reference_words")
    )
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
        f"{reference:,.1f} words; {report['exact']:.1f} % exact, {report['empty']:,} empty, "
        f"{report['distinct']:,} distinct; "
        + (f"{copied:.1f} % of word pairs" if copied is not None else "no word pairs")
        + " are in the source",
    ]
    for index in example_indices(len(scored.summaries)):
        lines += ["", *_example(scored, index)]
    return "\n".join(lines)


def _is_exact(summary: Summary) -> bool:
    return summary.prediction.strip() == summary.reference.strip()


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
    """Returns statistics of lengths; words are separated by white space."""
    counts = {
        "source_tokens": [s.source_tokens for s in summaries],
        "source_words": [len(s.source.split()) for s in summaries],
        "reference_words": [len(s.reference.split()) for s in summaries],
        "prediction_words": [len(s.prediction.split()) for s in summaries],
        "prediction_tokens": [s.prediction_tokens for s in summaries],
    }
    return {
        unit: {
            "mean": float(np.mean(values)),
            "median": float(np.median(values)),
            "min": min(values),
            "max": max(values),
        }
        for unit, values in counts.items()
    }


def _copied_bigrams(summaries: Sequence[Summary], protocol: RougeProtocol) -> float | None:
    """Returns the percentage of predicted bigrams that are in the source; None without bigrams."""
    copied = total = 0
    for summary in summaries:
        words, source = map(protocol.words, (summary.prediction, summary.source))
        pairs, known = list(pairwise(words)), set(pairwise(source))
        copied += sum(pair in known for pair in pairs)
        total += len(pairs)
    return 100 * copied / total if total else None


def _example(scored: ScoredSummaries, index: int) -> list[str]:
    summary, scores = scored.summaries[index], scored.scores[index]
    f1_scores = ", ".join(f"{name} {100 * s.f1:.1f}" for name, s in scores.items())
    columns = [
        textwrap.wrap(" ".join(words.split()), _WIDTH, max_lines=_LINES, placeholder=" ...")
        for words in (summary.reference, summary.prediction or "(nothing)")
    ]
    return [
        f"{summary.id}: {f1_scores} ({scored.protocol.name})",
        f"{'reference':<{_WIDTH}} | summary",
        *(f"{a:<{_WIDTH}} | {b}".rstrip() for a, b in zip_longest(*columns, fillvalue="")),
    ]
