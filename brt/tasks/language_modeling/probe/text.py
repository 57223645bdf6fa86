"""A probe as people read it."""

from collections.abc import Iterator, Sequence
from typing import Any

from brt.formatting import counted, short


def text(found: dict[str, Any]) -> str:
    """Tables of everything that `job.probe` found, the verdicts last."""
    p = found["protocol"]
    lines = [
        f"{found['workdir']}, step {found['step']}, {p['split']}: {p['tokens']:,} tokens of "
        f"{counted(p['documents'], 'document')} in {counted(p['lanes'], 'lane')}; "
        f"window {p['window']}, segment {p['segment_length']}, tokenizer {p['tokenizer']}; "
        f"{found['bits_per_byte']:.4f} bits per byte",
    ]
    for section in (_memory, _positions, _layers, _gates):
        lines += ["", *section(found)] if any(section(found)) else []
    return "\n".join([*lines, "", *found["verdicts"], found["gradients"]["verdict"]])


def _memory(found: dict[str, Any]) -> Iterator[str]:
    if not found["memory"]:
        return
    yield "bits per byte with a part of the memory replaced before every segment:"
    yield "zeroed: forgotten; shuffled: another document's; frozen: as after the first segment"
    yield _row("", "", "normal", "replaced", "difference", "+-")
    for row in found["memory"]:
        error = row["standard_error"]
        yield _row(
            row["part"], row["how"], f"{row['normal_bits_per_byte']:.4f}",
            f"{row['bits_per_byte']:.4f}", f"{row['difference']:+.4f}",
            "-" if error is None else f"{error:.4f}",
        )  # fmt: skip


def _positions(found: dict[str, Any]) -> Iterator[str]:
    rows = found["positions"]
    parts = list(rows[0]["without"]) if rows else []
    yield "bits per byte by position in the document, and with a part zeroed"
    yield _row("tokens", "read", "normal", *(f"no {part}" for part in parts))
    for row in rows:
        without = (f"{row['without'][part]:.4f}" for part in parts)
        yield _row(span(row), short(row["tokens"]), f"{row['bits_per_byte']:.4f}", *without)


def span(row: dict[str, Any]) -> str:
    """A bin of positions: 1k-2k, or from 100k on."""
    begin, end = (None if edge is None else edge // 1000 for edge in (row["from"], row["to"]))
    return f"{begin}k on" if end is None else f"{begin}k-{end}k" if begin else f"0-{end}k"


def _layers(found: dict[str, Any]) -> Iterator[str]:
    if not found["layers"]:
        return
    yield "recurrent layers: half of a disturbance of the states is left after so many tokens;"
    yield "the vectors' length, effective rank, mean cosine; gradient through a segment's states"
    yield _row("layer", "half-life", "length", "rank", "cosine", "gradient")
    through = {row["layer"]: row["through"] for row in found["gradients"]["states"]}
    for row in found["layers"]:
        state = row["state"] or {}
        figures = (_figure(state.get(name)) for name in ("norm", "rank", "similarity"))
        gradient = f"{through[row['layer']]:.1e}"
        yield _row(row["layer"], _figure(row["half_life_tokens"]), *figures, gradient)


def _gates(found: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in found["layers"] if row["gate"]]
    if not rows:
        return
    names = list(rows[0]["gate"]["openness"])
    yield "fixed gates: what a channel keeps per block, and its half-life in tokens"
    yield _row("layer", "", *(name.replace("_", " ") for name in names))
    for row in rows:
        for name, title in (("openness", "keeps"), ("half_life_tokens", "tokens")):
            yield _row(row["layer"], title, *(_figure(v) for v in row["gate"][name].values()))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _row(*cells: Any) -> str:
    return "  " + _joined([str(cell) for cell in cells])


def _joined(cells: Sequence[str]) -> str:
    return f"{cells[0]:10}{cells[1]:>10}" + "".join(f"{cell:>16}" for cell in cells[2:])
