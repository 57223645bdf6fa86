"""Measures how much time checkpoints add to training, as a share of the time of the train steps.

    python tools/benchmark/saving.py [--size=paper|small] [--model=Rec:fixed:skip]
        [--tokens=512] [--steps=8] [--every=1000] [--rounds=3] [--directory=DIR] [--json=FILE]

In each round, --steps train steps are measured twice: without a checkpoint, and with one that is
saved in the background after the first step. The second time ends when the checkpoint and its
checksums are complete and on the disk. The difference of the times is divided by the time of
--every steps. It does not depend on the batch size, so the share is smaller if a step has more
tokens. The table also has two parts of the difference: the time in which the trainer waits for a
copy of the arrays, and the time of the checksums, which are computed again to measure it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from conditions import report
from flags import parser
from timing import show
from train_step import Contestant, of_row

from brt import command_line, tree_utils
from brt.checkpointing import manifest
from brt.checkpointing.writer import CheckpointWriter
from brt.config import Checkpoint


class Trainer:
    """A compiled train step, and a writer that saves its states.

    Attributes:
      waited: seconds for which the steps had to wait when the last checkpoint was saved.
    """

    def __init__(self, contestant: Contestant, writer: CheckpointWriter):
        self.contestant, self._writer = contestant, writer
        self.saved, self.waited = 0, 0.0

    def seconds(self, steps: int, save: bool) -> float:
        """Measures a number of steps, in seconds.

        Args:
          steps: number of steps.
          save: True to save a checkpoint after the first step and to wait until it is complete.
        """
        begin = time.perf_counter()
        for step in range(steps):
            nats = self.contestant.run()
            if save and not step:
                jax.block_until_ready(nats)
                own = time.perf_counter()
                self.saved += 1
                self._writer.save(self.saved, self.contestant.state, {})
                self.waited = time.perf_counter() - own
            self._writer.check()
        jax.block_until_ready(nats)
        self._writer.wait()
        return time.perf_counter() - begin


def main(args: argparse.Namespace) -> None:
    asked = argparse.Namespace(size=args.size, tokens=args.tokens, dtype=args.dtype)
    config, _ = of_row(args.model, asked, [])
    contestant = Contestant(config)
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        with CheckpointWriter(Path(place) / "checkpoints", keep=1) as writer:
            trainer = Trainer(contestant, writer)
            trainer.seconds(2, save=True)  # The first steps and the first save take longer.
            rounds = [_round(trainer, args.steps) for _ in range(args.rounds)]
            checkpoint = Path(place) / "checkpoints" / str(trainer.saved)
            begin = time.perf_counter()
            problems = manifest.verify(checkpoint)
            checksums = time.perf_counter() - begin
            if problems:
                raise SystemExit(f"the checkpoint is damaged: {problems}")
    row = figures(rounds, args, checksums, tree_utils.required_bytes(contestant.state))
    show(f"{args.model}, a save every {args.every} steps", [row])
    report(args, [row], {args.model: config.model})


def _round(trainer: Trainer, steps: int) -> tuple[float, float, float]:
    """Returns the seconds without a save, with a save, and in which the steps waited for it."""
    without = trainer.seconds(steps, save=False)
    return without, trainer.seconds(steps, save=True), trainer.waited


def figures(
    rounds: list[tuple[float, float, float]],
    args: argparse.Namespace,
    checksums: float,
    size: int,
) -> dict[str, Any]:
    """Returns the row of the table: medians over the rounds.

    Args:
      rounds: the results of `_round`.
      args: the flags.
      checksums: seconds for computing the checksums.
      size: size of the state in bytes.
    """
    shares = [(b - a) / (a / args.steps * args.every) for a, b, _ in rounds]
    return {
        "state MB": size / 1e6,
        "step ms": statistics.median(a for a, *_ in rounds) / args.steps * 1e3,
        "save adds s": statistics.median(b - a for a, b, _ in rounds),
        "waits s": statistics.median(waited for *_, waited in rounds),
        "checksums s": checksums,
        "share %": 100 * statistics.median(shares),
    }


if __name__ == "__main__":
    flags = parser(
        __doc__, size=("paper", "or small"), tokens=(512, "a step"), dtype="float32", rounds=3,
        model=("Rec:fixed:skip", "a row of the paper's Table 1"),
        steps=(8, "a turn; they should outlast a save"),
        every=(Checkpoint().every, "steps between saves"),
    )  # fmt: skip
    flags.add_argument("--directory", help="where checkpoints go; default: the temporary one")
    command_line.main(main, flags)
