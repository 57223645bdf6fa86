"""Shows a run: its checkpoints, verified; its config, where it came from, its last metrics.

python -m brt.inspect --workdir=runs/quickstart
python -m brt.inspect --workdir=runs/quickstart --state_hash   # equal hashes, equal runs
"""

import argparse
from pathlib import Path

from brt import command_line
from brt.errors import ConfigError


def main(args: argparse.Namespace) -> None:
    if not args.workdir:
        raise ConfigError("--workdir says which run to show; name its directory")
    import jax

    jax.config.update("jax_platforms", "cpu")  # a trainer may have the accelerator
    from brt.training import inspection
    from brt.training.workdir import Workdir

    workdir = Workdir(Path(args.workdir))
    found = inspection.survey(workdir, args.step)
    if not args.state_hash:
        print(inspection.text(found), flush=True)
    try:
        inspection.check(found, args.step)
        if args.state_hash:
            found["state_hash"] = inspection.state_hash(workdir, found["step"])
            print(found["state_hash"])
    finally:
        if args.json:
            command_line.write_json(args.json, found)


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    flags.add_argument("--workdir", metavar="DIR", help="where the run lives")
    flags.add_argument("--step", type=int, help="of the checkpoint; the newest")
    flags.add_argument(
        "--state_hash", action="store_true",
        help="print only a sha256 of all that a resume restores",
    )  # fmt: skip
    command_line.add_json_flag(flags)
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
