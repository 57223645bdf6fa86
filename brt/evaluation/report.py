"""What a run leaves for people: plots, a yardstick, and a summary."""

import lzma
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer
from matplotlib.figure import Figure

from brt.errors import DataError
from brt.evaluation.drawing import curve, new_figure, smoothed
from brt.training.checkpoint import steps
from brt.training.metrics import read_metrics
from brt.training.progress import clock, short
from brt.training.workdir import Workdir

BITS_PER_BYTE = "bits per byte"
Yardstick = tuple[str, float]  # what something simpler makes of the same text, behind its name
_ENTROPY_TOKENS = 10_000_000  # that are counted at most
_TRAIN, _HELD_OUT, _YARDSTICK = "#4c78a8", ("#e4572e", "#2a9d62", "#a05195"), "#767676"


def xz_bits_per_byte(documents: Iterable[bytes]) -> float:
    """Size of `xz -9e` of the documents, each on its own, in bits per byte of all of them."""
    compressed = total = 0
    for document in documents:
        compressed += len(lzma.compress(document, preset=9 | lzma.PRESET_EXTREME))
        total += len(document)
    if not total:
        raise DataError("there is no text to compress: all documents are empty")
    return 8 * compressed / total


def token_entropy(tokens: Integer[np.ndarray, " N"]) -> float:
    """Bits per token of whoever knows how frequent each is, and nothing of its context."""
    counts = np.bincount(tokens[:_ENTROPY_TOKENS])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def tag(measure: str) -> str:
    """What a measure is called in metrics, behind the name of its split."""
    return measure.replace(" ", "_")


def plot_training(
    workdir: Workdir,
    *,
    bytes_per_token: float,
    yardstick: Yardstick | None = None,
    measure: str = BITS_PER_BYTE,
) -> list[Path]:
    """Draws plots/ from metrics.jsonl.

    Args:
      workdir: the run's.
      bytes_per_token: of the training documents; turns bits per token into bits per byte.
      yardstick: of the held-out documents; drawn as a line.
      measure: of how well the model predicts; as a tag, with underscores, that of held-out data.

    Raises:
      DataError: no training step is recorded.
    """
    records = read_metrics(workdir.metrics)
    if not any(record.get("train/bits_per_token") is not None for record in records):
        raise DataError(f"{workdir.metrics} records no training step, so there is nothing to draw")
    bits = _bits_figure(records, bytes_per_token, yardstick, measure)
    figures = {f"{tag(measure)}.png": bits, "optimization.png": _optimization_figure(records)}
    workdir.plots.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(workdir.plots / name, dpi=150)
    return [workdir.plots / name for name in figures]


def summary(
    workdir: Workdir,
    *,
    tokens: int,
    seconds: float,
    bits_per_byte: Mapping[str, float],
    yardstick: Yardstick | None = None,
    measure: str = BITS_PER_BYTE,
    objective: str = "language_modeling",
) -> str:
    """Where everything is and what to type next.

    Args:
      workdir: the run's.
      tokens: trained on, over all restarts.
      seconds: since this start.
      bits_per_byte: the last figure of each split, or of another measure.
      yardstick: of the same documents.
      measure: what the figures are.
      objective: what was learned.
    """
    step = (steps(workdir.checkpoints) or [0])[-1]
    lines = [f"Step {step}, {short(tokens)} tokens, {clock(seconds)} since the start."]
    for split, value in bits_per_byte.items():
        beside = f" ({yardstick[0]}: {yardstick[1]:.3f})" if yardstick else ""
        lines.append(f"{split}: {value:.3f} {measure}{beside}")
    places = {
        "checkpoints": workdir.checkpoints,
        "metrics": workdir.metrics,
        "plots": workdir.plots,
        "samples": workdir.samples,
        "log": workdir.log,
    }
    lines += ["", "Where it is:"]
    lines += [f"  {name:<12} {path}" for name, path in places.items()]
    path = shlex.quote(str(workdir.path))
    lines += [
        "",
        "What to type next:",
        *_NEXT[objective](path),
        f"  python -m brt.inspect --workdir={path}",
        f"  tensorboard --logdir={shlex.quote(str(workdir.tensorboard))}",
    ]
    return "\n".join(lines)


def _next_with_documents(path: str) -> list[str]:
    return [
        f"  python -m brt.evaluate --workdir={path} --split=test",
        f"  python -m brt.generate --workdir={path} --prompt='It was a dark night' "
        f"--max_tokens=500",
    ]


def _next_with_pairs(path: str) -> list[str]:
    own = "\"Pairs.{} = 'my_{}.jsonl'\""  # lines of {"document": ..., "summary": ...}
    train, validation = (f"--gin_bindings={own.format(s, s)}" for s in ("train", "validation"))
    return [
        f"  python -m brt.evaluate --workdir={path} --split=test "
        f"--gin_bindings='Decoding.beams = 4'",
        f"  python -m brt.generate --workdir={path} --prompt_file=document.txt",
        '  with your own pairs, a line of {"document": ..., "summary": ...} each:',
        f"  python -m brt.train --gin_file=configs/runs/summarize_quickstart.gin "
        f"--workdir=runs/mine {train} {validation}",
    ]


def _next_with_masks(path: str) -> list[str]:
    return [
        f"  python -m brt.evaluate --workdir={path} --split=test",
        f"  python -m brt.evaluate --workdir={path} --split=test "
        "--gin_bindings=\"Attention.kind = 'full'\"",
    ]


def _next_with_speech(path: str) -> list[str]:
    own = "--gin_bindings=\"Speech.{0} = '{0}.tsv'\""
    splits = " ".join(own.format(split) for split in ("train", "validation"))
    return [
        *_next_with_masks(path),
        f"  python -m brt.evaluate --workdir={path} --split=test --gin_bindings='Speech.beams = 8'",
        "  with your own speech, a table of wav files with the columns file and transcript each:",
        f"  python -m brt.train --gin_file=configs/runs/speech_quickstart.gin --workdir=runs/mine "
        f"{splits} --gin_bindings='Speech.test = ()'",
    ]


def _next_with_sentences(path: str) -> list[str]:
    return [
        *_next_with_masks(path),
        '  with your own sentences, a line of {"sentence": ..., "label": ...} each:',
        "  python -m brt.train --gin_file=configs/runs/classification_quickstart.gin "
        f"--workdir=runs/mine {_own_files('Sentences', 'jsonl')}",
    ]


def _next_with_numbers(path: str) -> list[str]:
    return [
        *_next_with_masks(path),
        '  with your own sentences, a line of {"sentence": ..., "score": ...} each:',
        "  python -m brt.train --gin_file=configs/runs/classification_quickstart.gin "
        "--gin_bindings=\"Training.objective = 'regression'\" "
        f"--workdir=runs/mine {_own_files('Sentences', 'jsonl')}",
    ]


def _next_with_questions(path: str) -> list[str]:
    return [
        *_next_with_masks(path),
        "  with your own questions, in files of SQuAD's form:",
        "  python -m brt.train --gin_file=configs/runs/spans_quickstart.gin "
        f"--workdir=runs/mine {_own_files('Questions', 'json')}",
    ]


def _own_files(section: str, ending: str) -> str:
    own = "--gin_bindings=\"{0}.{1} = '{1}.{2}'\""
    splits = " ".join(own.format(section, split, ending) for split in ("train", "validation"))
    return f"{splits} --gin_bindings='{section}.test = ()'"


_NEXT = {
    "language_modeling": _next_with_documents,
    "seq2seq": _next_with_pairs,
    "masked_language_modeling": _next_with_masks,
    "ctc": _next_with_speech,
    "classification": _next_with_sentences,
    "regression": _next_with_numbers,
    "spans": _next_with_questions,
}


def _bits_figure(
    records: Sequence[Mapping[str, Any]],
    bytes_per_token: float,
    yardstick: Yardstick | None,
    measure: str = BITS_PER_BYTE,
) -> Figure:
    figure, (axes,) = new_figure(1)
    tokens, train = curve(records, "train/bits_per_token")
    train = train / bytes_per_token
    smooth = smoothed(train)
    axes.plot(tokens, train, color=_TRAIN, alpha=0.25, linewidth=1)
    axes.plot(tokens, smooth, color=_TRAIN, linewidth=2, label="train (smoothed)")
    shown = [smooth[len(smooth) // 20 :]]  # the first steps would squash the rest
    splits = sorted({name for r in records for name in r if name.endswith(f"/{tag(measure)}")})
    for number, name in enumerate(splits):
        tokens, values = curve(records, name)
        color = _HELD_OUT[number % len(_HELD_OUT)]
        axes.plot(tokens, values, "o-", color=color, markersize=4, label=name.split("/")[1])
        shown.append(values[len(values) // 20 :])
    if yardstick:
        name, value = yardstick
        label = f"{name} of the held-out text ({value:.2f})"
        axes.axhline(value, color=_YARDSTICK, linestyle="--", label=label)
        shown.append(np.array([value]))
    low, high = np.min(np.concatenate(shown)), np.max(np.concatenate(shown))
    margin = 0.06 * (high - low) or 0.1
    axes.set(
        xlabel="training tokens",
        ylabel=measure,
        title="How well the model predicts text",
        ylim=(low - margin, high + margin),
    )
    axes.legend(frameon=False)
    return figure


def _optimization_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    figure, (upper, lower) = new_figure(2)
    upper.plot(*curve(records, "train/learning_rate"), color=_TRAIN, linewidth=2)
    upper.set(ylabel="learning rate", title="Learning rate and gradient norm")
    tokens, norms = curve(records, "train/gradient_norm")
    lower.plot(tokens, norms, color=_TRAIN, alpha=0.25, linewidth=1)
    lower.plot(tokens, smoothed(norms), color=_TRAIN, linewidth=2)
    lower.set(xlabel="training tokens", ylabel="gradient norm")
    if norms.size and norms.min() > 0:
        lower.set_yscale("log")
    return figure
