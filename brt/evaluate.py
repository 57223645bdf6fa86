"""Evaluates a trained model on whole documents.

python -m brt.evaluate --workdir=runs/quickstart --split=test --ablate=state
"""

import argparse
from pathlib import Path

from brt import command_line
from brt.errors import ConfigError


def main(args: argparse.Namespace) -> None:
    from brt.evaluation import job, saved

    if not args.workdir:
        raise ConfigError("--workdir says which model to evaluate; name a run's directory")
    workdir, found, config = saved.load_config(Path(args.workdir), args.step)
    config = command_line.resolve(args, base=config).config
    model = saved.load(workdir, found, config)
    report = job.evaluate(model, args.split, args.ablate)
    print(job.text(model, args.split, report))
    if args.json:
        command_line.write_json(args.json, report)


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    command_line.add_config_flags(flags)
    flags.add_argument("--split", choices=["train", "validation", "test"], default="test")
    flags.add_argument("--step", type=int, help="of the checkpoint; the newest")
    flags.add_argument(
        "--ablate", choices=["state", "cache", "both"],
        help="read once more, forgetting this at every segment: what is the memory worth?",
    )  # fmt: skip
    command_line.add_json_flag(flags)
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
