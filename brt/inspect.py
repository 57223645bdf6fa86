"""Shows a run: its verified checkpoints, its config, its origin and its last metrics.

python -m brt.inspect --workdir=runs/quickstart
python -m brt.inspect --workdir=runs/quickstart --state_hash   # equal hashes mean equal runs
python -m brt.inspect --workdir=runs/quickstart --data         # verify the prepared data
python -m brt.inspect --workdir=runs/quickstart --probe        # measure how much the memory helps
python -m brt.inspect --workdir=runs/quickstart --probe \\
    --gin.Evaluation.segment_length=64                         # memory is removed every 64 tokens
"""

import argparse
from pathlib import Path

from brt import command_line, output
from brt.errors import ConfigError


def main(args: argparse.Namespace) -> None:
    """Prints the description of a run, or the results of the checks that the flags request."""
    if not args.workdir:
        raise ConfigError("--workdir names the run to show; give its directory")
    requested = [flag for flag in ("probe", "state_hash", "data") if getattr(args, flag)]
    if len(requested) > 1:
        raise ConfigError(f"--{' and --'.join(requested)} cannot be combined; use one at a time")
    if args.probe:
        _probe(args)
        return
    if args.split is not None or args.tokens is not None:
        raise ConfigError("--split and --tokens are for --probe; add --probe")
    if args.gin_file or args.gin_bindings or args.print_config:
        raise ConfigError("settings are for --probe; add --probe")
    import jax

    # This command needs no accelerator, and a trainer may be using the accelerator.
    jax.config.update("jax_platforms", "cpu")
    from brt.training import inspection
    from brt.training.workdir import Workdir

    workdir = Workdir(Path(args.workdir))
    if args.data:
        command_line.print_figures(inspection.verify_data(workdir), args.json, args.workdir)
        return
    description = inspection.survey(workdir, args.step)
    if not args.state_hash:
        output.show(inspection.text(description))
    try:
        inspection.check(description, args.step)
        if args.state_hash:
            description = inspection.add_state_hash(workdir, description, args.step)
            output.show(description["state_hash"])
    finally:
        if args.json:
            command_line.write_json(args.json, description, args.workdir)


def _probe(args: argparse.Namespace) -> None:
    from brt.training import evaluations, saved_model

    if args.tokens is not None and args.tokens < 0:
        raise ConfigError(f"--tokens={args.tokens} must not be negative; 0 reads all")
    model = saved_model.open_run(args.workdir, args.step, command_line.changing(args))
    results = evaluations.inspect(model, args.split or "validation", args.tokens, output.show)
    if args.json:
        command_line.write_json(args.json, results, args.workdir)


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    command_line.add_config_flags(flags)
    flags.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    flags.add_argument(
        "--state_hash", action="store_true",
        help="print only a SHA-256 of everything that resuming restores",
    )  # fmt: skip
    flags.add_argument(
        "--data", action="store_true",
        help="only read all prepared data and compare them with their hashes",
    )  # fmt: skip
    flags.add_argument(
        "--probe", action="store_true",
        help="measure what the model uses its memory for; draws plots/probe_*.png",
    )  # fmt: skip
    flags.add_argument(
        "--split", choices=["train", "validation", "test"],
        help="split to probe on; default validation",
    )  # fmt: skip
    flags.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens to probe on; default 1000000; 0: the whole split",
    )
    command_line.add_json_flag(flags)
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
