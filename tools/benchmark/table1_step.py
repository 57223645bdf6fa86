"""Measures the relative step times of the paper's Table 1, and compares them with relative FLOPs.

    python tools/benchmark/table1_step.py [--tokens=4096] [--rounds=3] [--size=paper|small]
        [--models=Slide:13L,Rec:fixed:skip] [--vocabulary=32000] [--json=FILE]

A step is the forward and backward pass of the language-model loss, without optimizer and dropout,
with the paper's layer sizes and as many lanes as give `--tokens` tokens per step. The models take
turns; ratios are those of the fastest rounds.
"""

import dataclasses

from conditions import report
from flags import parser
from lm_step import Step
from timing import interleaved, show

from brt import runtime
from brt.config import Model
from brt.layers.sections import Recurrence
from brt.models.decoder import forward_flops_per_token

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
    flags = parser(
        __doc__, size=("paper", "or small"), tokens=(4096, "per step"), rounds=3,
        models=(USUAL, f"of {', '.join(PAPER)}"), vocabulary=(0, "32,000 of paper, 256 of small"),
        dtype="auto",
    )  # fmt: skip
    args = flags.parse_args()
    names = args.models.split(",")
    for name in names:
        if name not in PAPER:
            flags.error(f"--models={name} is no row of Table 1; choose of {', '.join(PAPER)}")
    if BASELINE not in names:
        flags.error(f"--models needs {BASELINE}, which the others are divided by")
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    size = dataclasses.replace(SIZES[args.size], dtype=args.dtype)
    if args.vocabulary:
        size = dataclasses.replace(size, vocab_size=args.vocabulary)
    steps = {name: Step(*row(name, size, args.tokens)) for name in names}
    times = interleaved({name: one.run for name, one in steps.items()}, args.rounds)
    flops = {name: forward_flops_per_token(one.model) for name, one in steps.items()}
    rows = [
        one.row(name, times)
        | {
            "tokens/s": round(args.tokens / min(times[name]) * 1e3),
            "time": min(times[name]) / min(times[BASELINE]),
            "FLOPs": flops[name] / flops[BASELINE],
            "paper": PAPER[name],
        }
        for name, one in steps.items()
    ]
    show(f"A step; time, FLOPs and paper are relative to {BASELINE}", rows)
    report(args, rows, {name: one.model for name, one in steps.items()})


if __name__ == "__main__":
    runtime.use_huge_pages()  # brt's commands call this, too.
    main()
