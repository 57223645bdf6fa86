"""Measures milliseconds and memory of a training step of the language models in .gin files.

    python tools/benchmark/run_step.py configs/base/long_context.gin configs/runs/long_context/*.gin
        [--rounds=3] [--json=FILE] [--gin_bindings='Training.segment_length = 4096']

A step is the forward and backward pass of the loss of random bytes, without the optimizer. The
models take turns; ratios to the time of the first one are medians over the rounds.
"""

import argparse
import dataclasses
from pathlib import Path

from conditions import report
from flags import parser
from lm_step import Step
from timing import interleaved, ratio, show

from brt import command_line, runtime


def main() -> None:
    flags = parser(__doc__, rounds=3)
    flags.add_argument("runs", nargs="+", help=".gin files")
    flags.add_argument("--gin_bindings", action="append", default=[], help="of all of them")
    args = flags.parse_args()
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    runs = {Path(file).stem: step(file, args.gin_bindings) for file in args.runs}
    times = interleaved({name: one.run for name, one in runs.items()}, args.rounds)
    first = next(iter(runs))
    rows = [
        one.row(name, times) | {f"of {first}": ratio(times, name, first)}
        for name, one in runs.items()
    ]
    show("A training step", rows)
    report(args, rows, {name: run.model for name, run in runs.items()})


def step(file: str, bindings: list[str]) -> Step:
    """Compiles the step of a .gin file, with a vocabulary of bytes if the file sets no size."""
    own = argparse.Namespace(gin_file=[file], gin_bindings=bindings, print_config=False)
    config = command_line.resolve(own).config
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 256)
    return Step(model, config.training.batch_size, config.training.segment_length)


if __name__ == "__main__":
    runtime.use_huge_pages()  # brt's commands call this, too.
    main()
