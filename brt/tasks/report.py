"""What an evaluation gives, whatever the task, and how it is called."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """A figure that sums a model up.

    Attributes:
      name: in reports, metrics and JSON.
      title: as plots and tables have it.
      form: how a table writes it.
      higher_is_better: of scores; not of bits and errors.
    """

    name: str
    title: str
    form: str = ".4f"
    higher_is_better: bool = False


BITS_PER_BYTE = Metric("bits_per_byte", "bits per byte")
BITS_PER_TOKEN = Metric("bits_per_token", "bits per token")
EXACT_ANSWERS = Metric("answers_exact", "answers exact, %", ".2f", higher_is_better=True)
SCORE = Metric("score", "score, %", ".2f", higher_is_better=True)  # what `score_name` says


class EvaluationResult(NamedTuple):
    """Of a split.

    Attributes:
      figures: JSON, with the protocol they must be quoted with.
      summary: the most telling of them in words.
      rows: by what they are ("documents", "predictions"), JSON, one a line.
      text: as people read it; the first line goes on from "workdir, step, split: ".
      name: added to that of the split in file names, where the model was read otherwise than it
        was trained.
      draw: gives a picture of the figures (PNG); None: there is none.
    """

    figures: dict[str, Any]
    summary: str
    rows: dict[str, list[dict[str, Any]]]
    text: str
    name: str = ""
    draw: Callable[[], bytes] | None = None


def some(count: int) -> Iterable[int]:
    """The places of a few of so many rows: the first, the middle and the last."""
    return sorted({0, count // 2, count - 1} - {-1}) if count else ()
