"""Measures the relative step times of the paper's Table 1, and compares them with relative FLOPs.

    python tools/benchmark/table1_step.py [--tokens=4096] [--rounds=3] [--size=paper|small]
        [--models=Slide:13L,Rec:fixed:skip] [--vocabulary=32000] [--json=FILE]

A step is the forward and backward pass of the language-model loss, without optimizer and dropout,
with the paper's layer sizes and as many lanes as give `--tokens` tokens per step. The models take
turns; ratios are those of the fastest rounds.
"""

import argparse
import dataclasses
import sys

from conditions import report
from lm_step import Contestant

from brt import runtime
from brt.config import Model
from brt.layers.sections import Recurrence
from brt.models.decoder import forward_flops_per_token
from brt.training.state import parameter_counts

SIZES = {
    "paper": Model(vocab_size=32000),
    "small": Model(
        model_dim=96,
        heads=3,
        head_dim=32,
        mlp_dim=384,
        window=32,
        vocab_size=256,
        kinds=(Recurrence(states=32),),
    ),
}
BASELINE = "Slide:13L"
PAPER = {  # Table 1, "step time (relative)"
    "XL:512": 0.88, "XL:1024": 1.20, "XL:2048": 2.11, "Slide:12L": 0.93, "Slide:13L": 1.00,
    "Rec:lstm:dual": 1.06, "Rec:lstm:single": 1.05, "Rec:lstm:skip": 1.00,
    "Rec:fixed:dual": 1.01, "Rec:fixed:single": 1.02, "Rec:fixed:skip": 0.99,
    "Feedback:lstm:single": 1.40, "Feedback:fixed:skip": 1.35,
}  # fmt: skip
USUAL = "XL:512,XL:2048,Slide:12L,Slide:13L,Rec:fixed:skip,Feedback:fixed:skip"


def row(name: str, size: Model, tokens: int) -> tuple[Model, int, int]:
    """Returns model, number of lanes and segment length of a row of Table 1.

    A segment has eight windows at most; that of XL has one.

    Args:
      name: name of the row, a key of PAPER.
      size: the model with the sizes that all rows share.
      tokens: tokens of a step.
    """
    kind, *rest = name.split(":")
    segment = min(8 * size.window, tokens)
    if kind == "XL":
        size = dataclasses.replace(size, window=size.window * int(rest[0]) // 512)
        segment = size.window
    elif kind == "Slide":
        size = dataclasses.replace(size, layers=int(rest[0].rstrip("L")))
    else:
        recurrence = dataclasses.replace(
            size.of(Recurrence), layers=(-3,), gate=rest[0], gate_layout=rest[1]
        )
        size = dataclasses.replace(size, kinds=(recurrence,), feedback=kind == "Feedback")
    return size, max(tokens // segment, 1), segment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="paper")
    parser.add_argument("--tokens", type=int, default=4096, help="per step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default=USUAL, help=f"of {', '.join(PAPER)}")
    parser.add_argument("--vocabulary", type=int, help="32,000 of paper, 256 of small")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    names = args.models.split(",")
    for name in names:
        if name not in PAPER:
            parser.error(f"--models={name} is no row of Table 1; choose of {', '.join(PAPER)}")
    if BASELINE not in names:
        parser.error(f"--models needs {BASELINE}, which the others are divided by")
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    size = dataclasses.replace(SIZES[args.size], dtype=args.dtype)
    if args.vocabulary:
        size = dataclasses.replace(size, vocab_size=args.vocabulary)
    contestants = {name: Contestant(*row(name, size, args.tokens)) for name in names}
    for i in range(args.rounds):
        for name, contestant in contestants.items():
            contestant.run()
            seconds = contestant.times[-1] / 1e3
            print(f"round {i + 1}: {name:22} {seconds:7.1f} s", file=sys.stderr)
    rows = [figures(name, contestants, size, args.tokens) for name in names]
    show(rows)
    report(args, rows, {name: contestant.model for name, contestant in contestants.items()})


def figures(
    name: str, contestants: dict[str, Contestant], size: Model, tokens: int
) -> dict[str, object]:
    """Returns the row of a model for the table of results."""

    def flops(of: str) -> float:
        return forward_flops_per_token(row(of, size, tokens)[0])

    times = sorted(contestants[name].times)
    total, non_embedding = parameter_counts(contestants[name].params)
    return {
        "model": name,
        "parameters": total,
        "parameters_non_embedding": non_embedding,
        "milliseconds_per_step": times[0],
        "median_milliseconds_per_step": times[len(times) // 2],
        "tokens_per_second": tokens / times[0] * 1e3,
        "relative_time": times[0] / min(contestants[BASELINE].times),
        "relative_flops": flops(name) / flops(BASELINE),
        "paper_relative_time": PAPER[name],
        "temporary_mib": contestants[name].temporary_mib,
    }


def show(rows: list[dict[str, object]]) -> None:
    print(
        f"{'model':22} {'parameters':>11} {'ms/step':>9} {'median':>9} {'tokens/s':>8} "
        f"{'time':>5} {'FLOPs':>5} {'paper':>5} {'temp MiB':>8}"
    )
    for r in rows:
        print(
            f"{r['model']:22} {r['parameters']:>11,} {r['milliseconds_per_step']:>9.1f} "
            f"{r['median_milliseconds_per_step']:>9.1f} {r['tokens_per_second']:>8,.0f} "
            f"{r['relative_time']:>5.2f} {r['relative_flops']:>5.2f} "
            f"{r['paper_relative_time']:>5.2f} {r['temporary_mib']:>8.0f}"
        )
    print(f"time, FLOPs and paper are relative to {BASELINE}")


if __name__ == "__main__":
    runtime.use_huge_pages()  # brt's commands call this, too.
    main()
