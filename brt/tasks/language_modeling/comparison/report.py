"""The report of a comparison of two models: classes of tokens, a text for people, and a plot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from brt.formatting import counted
from brt.tasks.language_modeling.comparison.terms import CLASSES
from brt.tasks.language_modeling.differences import Difference, basis, paired_difference


def class_rows(
    classes: Sequence[np.ndarray], nats: Sequence[np.ndarray], other: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Returns a row for each class of tokens, as JSON; classes without tokens are left out.

    The arguments have the class of each token of each document, its nats, and its nats in the other
    model.
    """
    rows = _rows(classes, len(CLASSES), nats, other)
    return [{"class": name, **row} for name, row in zip(CLASSES, rows, strict=True) if row]


def position_rows(
    nats: Sequence[np.ndarray], other: Sequence[np.ndarray], window: int
) -> list[dict[str, Any]]:
    """Returns a row for each range of positions in the document, as JSON.

    The first range has the length of the window in tokens, and each further range ends at four
    times the position of its start. The last range has no end. `nats` and `other` have the nats of
    each token of each document in the two models.
    """
    longest = max((len(own) for own in nats), default=0)
    starts = [0, window]
    while 4 * starts[-1] < longest:
        starts.append(4 * starts[-1])
    ranges = [np.searchsorted(starts, np.arange(len(own)), side="right") - 1 for own in nats]
    rows = _rows(ranges, len(starts), nats, other)
    return [{"from": start, **row} for start, row in zip(starts, rows, strict=True) if row]


def _rows(
    groups: Sequence[np.ndarray], count: int,
    nats: Sequence[np.ndarray], other: Sequence[np.ndarray],
) -> list[dict[str, Any]]:  # fmt: skip
    """Compares two models on each of `count` groups of tokens.

    A row has the number of tokens, the bits per token of both models, their difference with half of
    its 95 % confidence interval over documents, and the share of the group in the difference of all
    tokens. The row of a group without tokens is empty.
    """

    def sums(values: Sequence[np.ndarray] | None) -> np.ndarray:
        """Returns sums over the tokens of each group [documents, groups]."""
        weights = [None] * len(groups) if values is None else values
        return np.asarray([
            np.bincount(own, weight, count) for own, weight in zip(groups, weights, strict=True)
        ])  # fmt: skip

    counts, ours, theirs = sums(None), sums(nats), sums(other)
    total = float(np.sum(ours - theirs))
    rows: list[dict[str, Any]] = []
    for i in range(count):
        tokens = int(counts[:, i].sum())
        if not tokens:
            rows.append({})
            continue
        difference = paired_difference(ours[:, i], theirs[:, i], counts[:, i])
        bits, other_bits = (float(x[:, i].sum()) / math.log(2) / tokens for x in (ours, theirs))
        share = float(np.sum(ours[:, i] - theirs[:, i])) / total if total else None
        rows.append({
            "tokens": tokens, "bits_per_token": bits, "other_bits_per_token": other_bits,
            "difference": difference.value, "difference_95": difference.half_width, "share": share,
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
        basis(report["documents"]),
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
    window = report["protocol"]["window"]
    return "\n".join([
        *lines, "",
        *_table("bits per token of", [(row["class"], row) for row in report["classes"]]), "",
        f"window: {window:,} tokens; name: identifier, LaTeX command, single letter or capitalised "
        "word; share: of the difference of all tokens", "",
        *_table("bits per token at position", _named_positions(report["positions"])), "",
        "position: number of tokens of the document before the token",
    ])  # fmt: skip


def _named_positions(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the rows with names such as "512 to 2,047"."""
    ends = [f"to {row['from'] - 1:,}" for row in rows[1:]] + ["and later"]
    return [(f"{row['from']:,} {end}", row) for row, end in zip(rows, ends, strict=True)]


def _table(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Returns the lines of a table, one for each pair of a name and a row."""
    lines = [
        f"{title:26}{'tokens':>10}{'this':>9}{'other':>9}{'difference':>12}"
        f"{'95 % interval':>22}{'share':>8}"
    ]
    for name, row in rows:
        share = "-" if row["share"] is None else f"{round(100 * row['share'])} %"
        lines.append(
            f"{name:26}{row['tokens']:>10,}{row['bits_per_token']:>9.4f}"
            f"{row['other_bits_per_token']:>9.4f}{row['difference']:>+12.4f}"
            f"{_interval(row['difference'], row['difference_95']):>22}{share:>8}"
        )
    return lines


def draw(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns a plot (PNG) of the difference of each class of tokens."""
    from brt.drawing import class_plot, png

    differences = {row["class"]: (row["difference"], row["difference_95"]) for row in rows}
    return png(class_plot(differences, "difference, bits per token (negative: this run is better)"))
