"""Evaluates a trained model on whole documents.

python -m brt.evaluate --workdir=runs/quickstart --split=test --ablate=state
python -m brt.evaluate --workdir=models/smol --windows=256,512,1024   # compare three windows
python -m brt.evaluate --workdir=runs/recurrent --compare=runs/sliding   # compare two models
python -m brt.evaluate --workdir=runs/pairs --generate   # also writes completions
python -m brt.evaluate --workdir=runs/quickstart --split=validation --follow   # while it trains
"""

import argparse
from pathlib import Path

from brt import command_line, distributed, output
from brt.errors import ConfigError
from brt.training import preemption


def main(args: argparse.Namespace) -> None:
    """Evaluates a checkpoint, or with --follow every new one."""
    if not args.workdir:
        raise ConfigError("--workdir names the model to evaluate; give the directory of a run")
    distributed.start(args)
    if args.follow:
        with preemption.stop_at_once():
            _follow(args)
        return
    from brt.distributed import processes
    from brt.training import evaluations, saved_model

    with processes.explain_peer_errors():
        change = command_line.changing(args)
        model = saved_model.open_run(args.workdir, args.step, change)
        other = saved_model.open_run(args.compare, None, change) if args.compare else None
        evaluated = evaluations.evaluate(
            model, args.split, args.ablate,
            lambda result: output.show(result.text),
            windows=_windows(args.windows), other=other, generate=args.generate,
        )  # fmt: skip
        processes.wait_for_all("end")
    if args.json and processes.is_first():
        command_line.write_json(args.json, evaluated.report, args.workdir)


def _windows(text: str) -> tuple[int, ...]:
    """Returns the numbers in a list such as "256,512"."""
    if not text:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--windows={text} must be numbers of tokens, such as 256,512,1024")
    return tuple(map(int, parts))


def _follow(args: argparse.Namespace) -> None:
    """Evaluates checkpoints until training ends. After a stop, the same command continues."""
    from brt.training import following
    from brt.training.workdir import Workdir

    for flag in ("windows", "compare", "generate"):
        if getattr(args, flag):
            raise ConfigError(f"--{flag} evaluates one checkpoint; leave out --follow")
    if args.step is not None:
        raise ConfigError("--follow evaluates every checkpoint; leave out --step")

    def say(message: str) -> None:
        output.say(f"brt: {message}")

    workdir = Workdir(Path(args.workdir))
    waiter = following.Waiter(args.poll_seconds, args.timeout_minutes, say)
    config = following.wait_for_config(workdir.path, waiter)
    config = command_line.resolve(args, base=config).config
    follower = following.Follower(workdir, config, args.split, args.ablate, say)
    for evaluated in follower.reports(waiter):
        output.show(evaluated.line)
        if args.json:
            command_line.write_json(args.json, evaluated.report, args.workdir)


def parser() -> argparse.ArgumentParser:
    arguments = command_line.parser(__doc__)
    command_line.add_config_flags(arguments)
    arguments.add_argument(
        "--split", choices=["train", "validation", "test"], default="test", help="default test"
    )
    arguments.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    arguments.add_argument(
        "--ablate", choices=["state", "cache", "memory", "both"],
        help="evaluate again without this part of the memory, to measure what it is worth",
    )  # fmt: skip
    arguments.add_argument(
        "--windows", default="", metavar="N,N,...",
        help="evaluate a language model with each of these windows, to measure what context is "
        "worth",
    )  # fmt: skip
    arguments.add_argument(
        "--compare", type=command_line.directory, default="", metavar="DIR",
        help="compare a language model token by token with the newest checkpoint of another run, "
        "which reads the same documents, and with --ablate reads them without a part of its memory",
    )  # fmt: skip
    arguments.add_argument(
        "--generate", action="store_true",
        help="also let a language model write the completions of pairs, as the section Decoding "
        "says, and score them",
    )  # fmt: skip
    arguments.add_argument(
        "--follow", action="store_true",
        help="evaluate every checkpoint of a running trainer, until training ends",
    )  # fmt: skip
    arguments.add_argument(
        "--poll_seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between looks of --follow for new checkpoints; default 30",
    )
    arguments.add_argument(
        "--timeout_minutes", type=float, default=0.0, metavar="M",
        help="--follow gives up if no checkpoint appears for this long; 0: never",
    )  # fmt: skip
    distributed.add_flags(arguments)
    command_line.add_json_flag(arguments)
    return arguments


if __name__ == "__main__":
    command_line.main(main, parser())
