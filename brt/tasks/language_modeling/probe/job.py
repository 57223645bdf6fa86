"""Runs all probes of a checkpoint, and shows their results as text and plots.

The probes measure how the predictions depend on the memory. They are interventions (a text is read
while a part of the memory is replaced before every segment), gradients through the recurrent
states, and the retention of perturbed states.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from brt.config import Config
from brt.data import lost_bytes
from brt.data.preparation import Dataset
from brt.data.token_store import TokenStore
from brt.drawing import logarithmic, new_figure, png
from brt.errors import DataError
from brt.formatting import counted, short
from brt.tasks.arguments import Inspection, InspectionRequest
from brt.tasks.language_modeling.probe.gradients import gradient_reach
from brt.tasks.language_modeling.probe.interventions import (
    InterventionResult,
    evaluate_interventions,
)
from brt.tasks.language_modeling.probe.states import (
    fixed_gate_decay,
    half_life_blocks,
    half_life_tokens,
    retention,
)
from brt.types import Variables

TOKENS = 1_000_000  # By default, this number of tokens is read with each intervention.
# Positions in a document are grouped into bins. The bins begin at these numbers of tokens.
EDGES = (0, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


def inspect(variables: Variables, request: InspectionRequest) -> Inspection:
    """Runs all probes, and returns the results with a text and plots."""

    config, dataset, split, tokens, where = request
    count = TOKENS if tokens is None else tokens
    report = {**where, **probe_report(config, variables, dataset, split, count)}
    return Inspection(report, text(report), lambda: draw(report))


def probe_report(
    config: Config, variables: Variables, dataset: Dataset, split: str, tokens: int = 0
) -> dict[str, Any]:
    """Returns the results of all probes as JSON.

    The entries `memory`, `positions`, `layers` and `gradients` are the results of the functions
    `memory`, `positions`, `layers` and `gradient_reach`. The entry `protocol` has the conditions
    under which the text was read, and `verdicts` has a sentence for each part of the memory. About
    `tokens` tokens are read; 0 reads all.
    """
    store, donor = dataset.split(split), dataset.splits.get("train")
    if store.spans is not None:
        raise DataError(
            f"{split} consists of pairs, and a probe measures the bits of whole documents; name "
            f"documents with Data.{split} and Data.columns"
        )
    if lost := lost_bytes.loss_message(store.lost_bytes, int(store.bytes.sum()), 0):
        raise DataError(f"{split} cannot be probed by bits per byte: {lost}")
    if donor is store:
        donor = None
    total = min(tokens or math.inf, int(store.lengths.sum()))
    with tqdm(total=total, desc=f"probing {split}", unit="tok", unit_scale=True, disable=None) as b:
        result = evaluate_interventions(
            config, variables, dataset.tokenizer, store, donor=donor, tokens=tokens,
            progress=b.update,
        )  # fmt: skip
    rows = memory(result)
    return {
        "protocol": {
            "split": split,
            "documents": len(np.unique(result.document[result.document >= 0])),
            "tokens": int(result.tokens.sum()),
            "bytes": int(result.bytes.sum()),
            "lanes": len(result.document),
            "window": config.model.window,
            "segment_length": config.evaluation_segment_length,
            "training_segment_length": config.training.segment_length,
            "tokenizer": dataset.tokenizer.name,
        },
        "bits_per_byte": result.bits_per_byte(None, result.document >= 0),
        "memory": rows,
        "positions": positions(result),
        "gradients": gradient_reach(config, variables, store),
        "layers": layers(config, variables, store, result),
        "verdicts": [_verdict(row) for row in rows if row["how"] == "zeroed"],
    }


def memory(result: InterventionResult) -> list[dict[str, Any]]:
    """Returns a row, as JSON, for each intervention.

    A row has the bits per byte with the intervention, the bits per byte of the unchanged model on
    the same blocks, and their difference.
    """
    rows = []
    for intervention in filter(None, result.nats):
        where = result.counted(intervention)
        normal, bits = (result.bits_per_byte(a, where) for a in (None, intervention))
        rows.append(
            {
                **intervention._asdict(),
                "normal_bits_per_byte": normal,
                "bits_per_byte": bits,
                "difference": bits - normal,
                "standard_error": _finite(result.standard_error(intervention)),
                "tokens": int(result.tokens[where].sum()),
            }
        )
    return rows


def positions(result: InterventionResult) -> list[dict[str, Any]]:
    """Returns a row, as JSON, for each range of positions in a document (see `EDGES`), with the
    bits per byte of the blocks that begin in this range.

    The entry `without` of a row has, for each part of the memory, the bits per byte of these blocks
    with the part zeroed.
    """
    rows = []
    for begin, end in zip(EDGES, (*EDGES[1:], None), strict=True):
        where = (result.document >= 0) & (result.position >= begin)
        where &= result.position < (end or np.inf)
        if not result.bytes[where].any():
            continue
        zeroed = [i for i in result.nats if i and i.how == "zeroed"]
        rows.append(
            {
                "from": begin,
                "to": end,
                "tokens": int(result.tokens[where].sum()),
                "bytes": int(result.bytes[where].sum()),
                "bits": float(result.nats[None][where].sum() / math.log(2)),
                "bits_per_byte": result.bits_per_byte(None, where),
                "standard_error": _finite(result.bits_error(where)),
                "without": {i.part: result.bits_per_byte(i, where) for i in zeroed},
            }
        )
    return rows


def layers(
    config: Config, variables: Variables, store: TokenStore, result: InterventionResult
) -> list[dict[str, Any]]:
    """Returns a row, as JSON, for each layer with a recurrent state: metrics of its gate and of its
    states, and the number of tokens after which half of a perturbation of the states remains.
    """
    window = config.model.block_length
    decays = fixed_gate_decay(config.model, variables.params)
    rows = []
    for layer, remaining in retention(config, variables, store).items():
        gate = None
        if layer in decays:
            half_lives = half_life_tokens(decays[layer], window)
            gate = {
                "openness": _distribution(np.exp(-np.asarray(decays[layer]))),
                "half_life_blocks": _distribution(np.asarray(half_lives) / window),
                "half_life_tokens": _distribution(np.asarray(half_lives)),
            }
        blocks = half_life_blocks(remaining) if remaining else None
        rows.append(
            {
                "layer": layer,
                "gate": gate,
                "retention": remaining,
                "half_life_blocks": blocks,
                "half_life_tokens": None if blocks is None else blocks * window,
                "state": result.states.get(layer),
            }
        )
    return rows


def _distribution(values: np.ndarray) -> dict[str, float]:
    names = ("min", "lower_quartile", "median", "upper_quartile", "max")
    quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    return dict(zip(names, map(float, quantiles), strict=True))


def _verdict(row: dict[str, Any]) -> str:
    part, difference, error = row["part"], row["difference"], row["standard_error"]
    if difference == 0:
        return f"the {part} changes nothing: the model does not read it"
    if error is None or abs(difference) < 2 * error:
        return f"the {part} makes no difference that {row['tokens']:,} tokens can show"
    worth = "saves" if difference > 0 else "costs"
    return f"the {part} {worth} {abs(difference):.4f} bits per byte"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def text(report: dict[str, Any]) -> str:
    """Returns the result of `probe_report` as tables and sentences for people."""
    p = report["protocol"]
    lines = [
        f"{report['workdir']}, step {report['step']}, {p['split']}: {p['tokens']:,} tokens of "
        f"{counted(p['documents'], 'document')} in {counted(p['lanes'], 'lane')}; "
        f"window {p['window']}, segment {p['segment_length']}, tokenizer {p['tokenizer']}; "
        f"{report['bits_per_byte']:.4f} bits per byte",
    ]
    for section in (_memory_text, _positions_text, _layers_text, _gates_text):
        lines += ["", *section(report)] if any(section(report)) else []
    return "\n".join([*lines, "", *report["verdicts"], report["gradients"]["verdict"]])


def _memory_text(report: dict[str, Any]) -> Iterator[str]:
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


def _positions_text(report: dict[str, Any]) -> Iterator[str]:
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


def _layers_text(report: dict[str, Any]) -> Iterator[str]:
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


def _gates_text(report: dict[str, Any]) -> Iterator[str]:
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


def _row(first: Any, second: Any, *cells: Any) -> str:
    return f"  {first!s:10}{second!s:>10}" + "".join(f"{cell!s:>16}" for cell in cells)


_COLORS = {"normal": "#4c78a8", "state": "#e4572e", "cache": "#2a9d62", "memory": "#a05195"}


def draw(report: dict[str, Any]) -> dict[str, bytes]:
    """Returns plots of the result of `probe_report`: the contents of PNG files by name."""
    figures = {"probe_positions.png": _plot_positions(report["positions"])}
    if report["memory"]:
        figures["probe_memory.png"] = _plot_memory(report["memory"])
    if report["layers"]:
        figures["probe_horizon.png"] = _plot_horizon(report)
        figures["probe_gradients.png"] = _plot_gradients(report["gradients"]["states"])
    return {name: png(figure) for name, figure in figures.items()}


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure, (axes,) = new_figure(1)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _plot_memory(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes(
        "What the memory is worth", "replaced before every segment", "bits per byte more"
    )
    for place, row in enumerate(rows):
        error = row["standard_error"] or 0.0
        axes.bar(place, row["difference"], yerr=error, color=_COLORS[row["part"]], capsize=4)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [f"{row['part']}\n{row['how']}" for row in rows])
    return figure


def _plot_positions(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes(
        "Bits by position in the document", "tokens before the block", "bits per byte"
    )
    places = range(len(rows))
    axes.errorbar(
        places, [r["bits_per_byte"] for r in rows], [r["standard_error"] or 0.0 for r in rows],
        fmt="o-", color=_COLORS["normal"], capsize=4, label="normal",
    )  # fmt: skip
    for part in rows[0]["without"]:
        values = [row["without"][part] for row in rows]
        axes.plot(places, values, "o--", color=_COLORS[part], label=f"without the {part}")
    axes.set_xticks(places, [span(row) for row in rows])
    axes.legend(frameon=False)
    return figure


def _plot_horizon(report: dict[str, Any]) -> Figure:
    figure, axes = _axes(
        "How long recurrent layers remember", "blocks", "share left of a disturbance of the states"
    )
    for row in report["layers"]:
        shares = [1.0, *row["retention"]]
        (line,) = axes.plot(range(len(shares)), shares, "o-", label=f"layer {row['layer']}")
        if row["gate"] and (openness := row["gate"]["openness"]):
            blocks = np.arange(len(shares))
            low, high = (openness[name] ** blocks for name in ("lower_quartile", "upper_quartile"))
            label = f"layer {row['layer']}: middle half of its gates"
            axes.fill_between(blocks, low, high, alpha=0.15, color=line.get_color(), label=label)
    axes.axhline(0.5, color="black", linestyle=":", linewidth=0.8)
    axes.legend(frameon=False)
    return figure


def _plot_gradients(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes(
        "How far back the loss reaches", "block of the segment",
        "gradient norm at the states before the segment",
    )  # fmt: skip
    for row in rows:
        axes.plot(
            range(1, len(row["blocks"]) + 1), row["blocks"], "o-", label=f"layer {row['layer']}"
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    logarithmic(axes, [value for row in rows for value in row["blocks"]])
    axes.legend(frameon=False)
    return figure
