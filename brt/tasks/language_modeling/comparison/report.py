"""The report of a comparison of two models: classes of tokens, a text for people, and a plot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from brt.formatting import counted
from brt.tasks.language_modeling.comparison.terms import CLASSES
from brt.tasks.language_modeling.differences import Difference, paired_difference


def class_rows(
    classes: Sequence[np.ndarray], nats: Sequence[np.ndarray], other: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Returns a row for each class of tokens, as JSON.

    A row has the number of tokens, the bits per token of both models, their difference with half of
    its 95 % confidence interval over documents, and the share of the class in the difference of all
    tokens. Classes without tokens are left out.

    Args:
      classes: the class of each token of each document.
      nats: the nats of each token of each document.
      other: the same of the other model.
    """

    def sums(values: Sequence[np.ndarray] | None) -> np.ndarray:
        """Returns sums over the tokens of each class [documents, classes]."""
        weights = [None] * len(classes) if values is None else values
        return np.asarray([
            np.bincount(own, weight, len(CLASSES))
            for own, weight in zip(classes, weights, strict=True)
        ])  # fmt: skip

    counts, ours, theirs = sums(None), sums(nats), sums(other)
    total = float(np.sum(ours - theirs))
    rows = []
    for i, name in enumerate(CLASSES):
        tokens = int(counts[:, i].sum())
        if not tokens:
            continue
        difference = paired_difference(ours[:, i], theirs[:, i], counts[:, i])
        bits, other_bits = (float(x[:, i].sum()) / math.log(2) / tokens for x in (ours, theirs))
        share = float(np.sum(ours[:, i] - theirs[:, i])) / total if total else None
        rows.append({
            "class": name, "tokens": tokens, "bits_per_token": bits,
            "other_bits_per_token": other_bits, "difference": difference.value,
            "difference_95": difference.half_width, "share": share,
        })  # fmt: skip
    return rows


def summary(report: Mapping[str, Any], difference: Difference | None) -> str:
    """Returns a phrase with the difference in bits per byte, which is None if it is not defined."""
    if difference is None:
        return "compared per token, because the tokens do not reproduce the text"
    return f"{difference.value:+.4f} bits/byte compared with {report['other']['run']}"


def _interval(value: float | None, half: float | None) -> str:
    if value is None or half is None:
        return "one document"
    return f"{value - half:+.4f} to {value + half:+.4f}"


def text(report: Mapping[str, Any]) -> str:
    """Returns the report as text for people: both models, and a row for each class of tokens."""
    other = report["other"]
    without = other["protocol"]["ablate"]
    name = other["run"] + (f" without {without}" if without else "")
    lines = [
        f"{counted(report['documents'], 'document')}, {report['bytes']:,} bytes",
        f"compared with {name}, step {other['step']}; negative differences: the evaluated run is "
        "better",
        "",
    ]
    # Tokens of different tokenizers cannot be compared.
    metrics = ("bits_per_byte", "bits_per_token") if "classes" in report else ("bits_per_byte",)
    for metric in metrics:
        ours, theirs = report[metric], other[metric]
        if ours is not None and theirs is not None:
            lines.append(f"{metric.replace('_', ' ')}: {ours:.4f}, other {theirs:.4f}")
    if report["difference"] is not None:
        interval = _interval(report["difference"], report["difference_95"])
        lines.append(f"difference in bits per byte: {report['difference']:+.4f} ({interval})")
    if "classes" not in report:
        return "\n".join([
            *lines, "the tokenizers differ, so the models are compared by documents, not by tokens",
        ])  # fmt: skip
    lines += [
        "",
        f"{'bits per token of':26}{'tokens':>10}{'this':>9}{'other':>9}{'difference':>12}"
        f"{'95 % interval':>22}{'share':>8}",
    ]
    for row in report["classes"]:
        share = "-" if row["share"] is None else f"{round(100 * row['share'])} %"
        lines.append(
            f"{row['class']:26}{row['tokens']:>10,}{row['bits_per_token']:>9.4f}"
            f"{row['other_bits_per_token']:>9.4f}{row['difference']:>+12.4f}"
            f"{_interval(row['difference'], row['difference_95']):>22}{share:>8}"
        )
    window = report["protocol"]["window"]
    return "\n".join([
        *lines, "",
        f"window: {window:,} tokens; name: identifier, LaTeX command, single letter or capitalised "
        "word; share: of the difference of all tokens",
    ])  # fmt: skip


def draw(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns a plot (PNG) of the difference of each class of tokens."""
    from brt.drawing import class_plot, png

    differences = {row["class"]: (row["difference"], row["difference_95"]) for row in rows}
    return png(class_plot(differences, "difference, bits per token (negative: this run is better)"))
