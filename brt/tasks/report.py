"""Metrics and results of evaluations, in a form that all tasks share."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """A number that summarises the quality of a model.

    Attributes:
      name: key in reports, in metrics.jsonl and in JSON output.
      title: label in plots and tables.
      form: format specification for tables.
    """

    name: str
    title: str
    form: str = ".4f"


BITS_PER_BYTE = Metric("bits_per_byte", "bits per byte")
BITS_PER_TOKEN = Metric("bits_per_token", "bits per token")
EXACT_ANSWERS = Metric("answers_exact", "answers exact, %", ".2f")
# The metric "score" is defined differently for each data set. The entry `score_name` of a report
# names the definition.
SCORE = Metric("score", "score, %", ".2f")


class EvaluationResult(NamedTuple):
    """Result of the evaluation of one split.

    Attributes:
      metrics: the metrics, and the protocol under which they were computed, as JSON.
      summary: a phrase with the most important metrics.
      rows: JSON rows by kind ("documents", "predictions"); each kind becomes a file of JSON lines.
      text: the report as text for people. Commands print "<workdir>, step <step>, <split>: " before
        this text, without a line break, so the first line has to fit to this beginning.
      name: suffix of the names of the files to which the result is written; not empty if the
        evaluation used other settings than training.
      draw: function that returns the content of a PNG file with a plot; None if there is no plot.
      page: function that returns an HTML page; None if there is no page.
    """

    metrics: dict[str, Any]
    summary: str
    rows: dict[str, list[dict[str, Any]]]
    text: str
    name: str = ""
    draw: Callable[[], bytes] | None = None
    page: Callable[[], str] | None = None


def example_indices(count: int) -> Iterable[int]:
    """Returns the indices of the first, the middle and the last of `count` rows."""
    return sorted({0, count // 2, count - 1} - {-1}) if count else ()
