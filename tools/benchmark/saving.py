"""What checkpoints cost the train step, as a share of its time, in one run.

    python tools/benchmark/saving.py [--size=paper|small] [--model=Rec:fixed:skip]
        [--tokens=512] [--steps=8] [--every=1000] [--rounds=3] [--directory=DIR] [--json=FILE]

So many steps, and so many with a save begun behind the first, take turns; what the save adds, until
it is whole, checksummed and on the disk, is divided by the time of Checkpoint.every steps. Nothing
of it grows with the batch: more tokens a step make the share smaller. A part of it is the time in
which the trainer waits for the copy of the arrays; another is the checksums', which are taken once
more on their own.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from timing import show
from train_step import Contestant, of_row

from brt import command_line, tree_utils
from brt.checkpointing import manifest
from brt.checkpointing.writer import CheckpointWriter
from brt.config import Checkpoint


class Trainer:
    """A train step, and a writer of its states.

    Attributes:
      waited: seconds that the last save kept the steps waiting.
    """

    def __init__(self, contestant: Contestant, writer: CheckpointWriter):
        self.contestant, self._writer = contestant, writer
        self.saved, self.waited = 0, 0.0

    def seconds(self, steps: int, save: bool) -> float:
        """Of so many steps, and a save behind the first of them, to its end."""
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
    config, tokens = of_row(args.model, asked, [])
    contestant = Contestant(config)
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        with CheckpointWriter(Path(place) / "checkpoints", keep=1) as writer:
            trainer = Trainer(contestant, writer)
            trainer.seconds(2, save=True)  # the first of each is not measured
            rounds = [_round(trainer, args.steps) for _ in range(args.rounds)]
            checkpoint = Path(place) / "checkpoints" / str(trainer.saved)
            begin = time.perf_counter()
            problems = manifest.verify(checkpoint)
            checksums = time.perf_counter() - begin
            if problems:
                raise SystemExit(f"the checkpoint is damaged: {problems}")
    row = figures(rounds, args, checksums, tree_utils.required_bytes(contestant.state))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {tokens:,} tokens a step")
    show(f"{args.model}, a save every {args.every} steps", [row])
    if args.json:
        command_line.write_json(args.json, {"rows": [row]}, None)


def _round(trainer: Trainer, steps: int) -> tuple[float, float, float]:
    """Seconds without a save and with one, and those in which the steps waited."""
    without = trainer.seconds(steps, save=False)
    return without, trainer.seconds(steps, save=True), trainer.waited


def figures(
    rounds: list[tuple[float, float, float]],
    args: argparse.Namespace,
    checksums: float,
    size: int,
) -> dict[str, Any]:
    """Medians over the rounds; shares are of the steps of their own round."""
    shares = [(b - a) / (a / args.steps * args.every) for a, b, _ in rounds]
    return {
        "state MB": size / 1e6,
        "step ms": statistics.median(a for a, *_ in rounds) / args.steps * 1e3,
        "save adds s": statistics.median(b - a for a, b, _ in rounds),
        "waits s": statistics.median(waited for *_, waited in rounds),
        "checksums s": checksums,
        "share %": 100 * statistics.median(shares),
    }


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    flags.add_argument("--size", default="paper", choices=["paper", "small"])
    flags.add_argument("--model", default="Rec:fixed:skip", help="a row of the paper's Table 1")
    flags.add_argument("--tokens", type=int, default=512, help="a step")
    flags.add_argument("--dtype", default="float32")
    flags.add_argument("--steps", type=int, default=8, help="a turn; they should outlast a save")
    flags.add_argument("--every", type=int, default=Checkpoint().every, help="steps between saves")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--directory", help="where checkpoints go; default: the temporary one")
    command_line.add_json_flag(flags)
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
