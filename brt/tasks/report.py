"""Metrics and results of evaluations, in a form that all tasks share."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """A number that summarises the quality of a model."""

    name: str  # key in reports, in metrics.jsonl and in JSON output
    title: str  # label in plots and tables
    form: str = ".4f"  # format specification for tables


BITS_PER_BYTE = Metric("bits_per_byte", "bits per byte")
BITS_PER_TOKEN = Metric("bits_per_token", "bits per token")
ROUGE_L = Metric("rougeL", "ROUGE-L", ".2f")
# The cost of reading a pair of mean length: a prompt and its completion, or a document and its
# summary.
PAIR_COST = Metric("gigaflops_per_pair", "GFLOPs per pair", ".3f")
EXACT_ANSWERS = Metric("answers_exact", "answers exact, %", ".2f")
# The metric "score" is defined differently for each data set. The entry `score_name` of a report
# names the definition.
SCORE = Metric("score", "score, %", ".2f")


class EvaluationResult(NamedTuple):
    """Result of the evaluation of one split."""

    # The metrics, and the protocol under which they were computed, as JSON.
    metrics: dict[str, Any]
    summary: str  # a phrase with the most important metrics
    # JSON rows by kind ("documents", "predictions"); each kind becomes a file of JSON lines.
    rows: dict[str, list[dict[str, Any]]]
    # The report for people. Commands print "<workdir>, step <step>, <split>: " before it, without a
    # line break, so the first line of the report has to continue that beginning.
    text: str
    # Suffix for the names of the result's files, such as "_windows"; "" if a single model was
    # evaluated with the settings of training.
    name: str = ""
    draw: Callable[[], bytes] | None = None  # content of a PNG file with a plot
    page: Callable[[], str] | None = None  # an HTML page


def example_indices(count: int) -> Iterable[int]:
    """Returns the indices of the first, the middle and the last of `count` rows."""
    return sorted({0, count // 2, count - 1} - {-1}) if count else ()
