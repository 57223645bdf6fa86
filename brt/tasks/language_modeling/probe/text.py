"""Formats the results of the probes as text."""

from collections.abc import Iterator, Sequence
from typing import Any

from brt.formatting import counted, short


def text(report: dict[str, Any]) -> str:
    """Returns the result of `job.probe_report` as tables and sentences for people."""
    p = report["protocol"]
    lines = [
        f"{report['workdir']}, step {report['step']}, {p['split']}: {p['tokens']:,} tokens of "
        f"{counted(p['documents'], 'document')} in {counted(p['lanes'], 'lane')}; "
        f"window {p['window']}, segment {p['segment_length']}, tokenizer {p['tokenizer']}; "
        f"{report['bits_per_byte']:.4f} bits per byte",
    ]
    for section in (_memory, _positions, _layers, _gates):
        lines += ["", *section(report)] if any(section(report)) else []
    return "\n".join([*lines, "", *report["verdicts"], report["gradients"]["verdict"]])


def _memory(report: dict[str, Any]) -> Iterator[str]:
    if not report["memory"]:
        return
    yield "bits per byte with a part of the memory replaced before every segment:"
    yield "zeroed: reset; shuffled: from another document; frozen: as after the first segment"
    yield _row("", "", "normal", "replaced", "difference", "+-")
    for row in report["memory"]:
        error = row["standard_error"]
        yield _row(
            row["part"], row["how"], f"{row['normal_bits_per_byte']:.4f}",
            f"{row['bits_per_byte']:.4f}", f"{row['difference']:+.4f}",
            "-" if error is None else f"{error:.4f}",
        )  # fmt: skip


def _positions(report: dict[str, Any]) -> Iterator[str]:
    rows = report["positions"]
    parts = list(rows[0]["without"]) if rows else []
    yield "bits per byte by position in the document, and with a part zeroed"
    yield _row("tokens", "read", "normal", *(f"no {part}" for part in parts))
    for row in rows:
        without = (f"{row['without'][part]:.4f}" for part in parts)
        yield _row(span(row), short(row["tokens"]), f"{row['bits_per_byte']:.4f}", *without)


def span(row: dict[str, Any]) -> str:
    """Returns a range of positions as text, such as "1k-2k", or "100k on" for the last range."""
    begin, end = (None if edge is None else edge // 1000 for edge in (row["from"], row["to"]))
    return f"{begin}k on" if end is None else f"{begin}k-{end}k" if begin else f"0-{end}k"


def _layers(report: dict[str, Any]) -> Iterator[str]:
    if not report["layers"]:
        return
    yield "recurrent states: number of tokens after which half of a perturbation of the states is"
    yield "left; the vectors' length, effective rank, mean cosine; gradient through a segment"
    yield _row("layer", "half-life", "length", "rank", "cosine", "gradient")
    through = {row["layer"]: row["through"] for row in report["gradients"]["states"]}
    for row in report["layers"]:
        state = row["state"] or {}
        metrics = (_number(state.get(name)) for name in ("norm", "rank", "similarity"))
        gradient = f"{through[row['layer']]:.1e}"
        yield _row(row["layer"], _number(row["half_life_tokens"]), *metrics, gradient)


def _gates(report: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in report["layers"] if row["gate"]]
    if not rows:
        return
    names = list(rows[0]["gate"]["openness"])
    yield "fixed gates: share that a channel keeps per block, and its half-life in tokens"
    yield _row("layer", "", *(name.replace("_", " ") for name in names))
    for row in rows:
        for name, title in (("openness", "keeps"), ("half_life_tokens", "tokens")):
            yield _row(row["layer"], title, *(_number(v) for v in row["gate"][name].values()))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _row(*cells: Any) -> str:
    return "  " + _joined([str(cell) for cell in cells])


def _joined(cells: Sequence[str]) -> str:
    return f"{cells[0]:10}{cells[1]:>10}" + "".join(f"{cell:>16}" for cell in cells[2:])
