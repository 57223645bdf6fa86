"""Shows a run: its checkpoints, verified; its config, where it came from, its last metrics.

python -m brt.inspect --workdir=runs/quickstart
python -m brt.inspect --workdir=runs/quickstart --state_hash   # equal hashes, equal runs
python -m brt.inspect --workdir=runs/quickstart --data         # are the prepared data whole?
python -m brt.inspect --workdir=runs/quickstart --probe        # what is its memory worth?
python -m brt.inspect --workdir=runs/quickstart --probe \\
    --gin.Evaluation.segment_length=64                         # taken away before every 64 tokens
"""

import argparse
import functools
from pathlib import Path

from brt import command_line
from brt.errors import ConfigError


def main(args: argparse.Namespace) -> None:
    if not args.workdir:
        raise ConfigError("--workdir says which run to show; name its directory")
    asked = [flag for flag in ("probe", "state_hash", "data") if getattr(args, flag)]
    if len(asked) > 1:
        raise ConfigError(f"--{' and --'.join(asked)} are several questions; ask them one by one")
    if args.probe:
        _probe(args)
        return
    if args.split is not None or args.tokens is not None:
        raise ConfigError("--split and --tokens say what --probe reads; add --probe")
    if args.gin_file or args.gin_bindings or args.print_config:
        raise ConfigError("settings say how --probe reads; add --probe")
    import jax

    jax.config.update("jax_platforms", "cpu")  # a trainer may have the accelerator
    from brt.formatting import printable
    from brt.training import inspection
    from brt.training.workdir import Workdir

    workdir = Workdir(Path(args.workdir))
    if args.data:
        command_line.print_figures(inspection.verify_data(workdir), args.json, args.workdir)
        return
    found = inspection.survey(workdir, args.step)
    if not args.state_hash:
        print(printable(inspection.text(found)), flush=True)
    try:
        inspection.check(found, args.step)
        if args.state_hash:
            found["state_hash"] = inspection.state_hash(workdir, found["step"])
            print(found["state_hash"])
    finally:
        if args.json:
            command_line.write_json(args.json, found, args.workdir)


def _probe(args: argparse.Namespace) -> None:
    from brt.evaluation import job
    from brt.training.start import saved_model

    if args.tokens is not None and args.tokens < 0:
        raise ConfigError(f"--tokens={args.tokens} must not be negative; 0 reads all")
    workdir, checkpoint, config = saved_model.load_config(Path(args.workdir), args.step)
    config = command_line.resolve(args, base=config).config
    model = saved_model.load(workdir, checkpoint, config)
    show = functools.partial(print, flush=True)
    found = job.inspect(model, args.split or "validation", args.tokens, show)
    if args.json:
        command_line.write_json(args.json, found, args.workdir)


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    command_line.add_config_flags(flags)
    flags.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    flags.add_argument(
        "--state_hash", action="store_true",
        help="print only a sha256 of all that a resume restores",
    )  # fmt: skip
    flags.add_argument(
        "--data", action="store_true",
        help="read only the prepared data, all of them, and compare them with their hashes",
    )  # fmt: skip
    flags.add_argument(
        "--probe", action="store_true",
        help="measure what the model does with its memory; draws plots/probe_*.png",
    )  # fmt: skip
    flags.add_argument(
        "--split", choices=["train", "validation", "test"], help="to probe on; default validation"
    )
    flags.add_argument(
        "--tokens", type=int, metavar="N", help="to probe on; default 1000000; 0: all of the split"
    )
    command_line.add_json_flag(flags)
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
