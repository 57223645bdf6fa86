"""Runs a model over many settings, one process each, and compares what comes out.

python -m brt.sweep --gin_file=configs/sweeps/gates.gin --jobs=2

Started again, it goes on with what is not finished.
"""

import argparse
from pathlib import Path

from brt import command_line
from brt.errors import ConfigError
from brt.sweeping import points, settings


def main(args: argparse.Namespace) -> None:
    if not args.gin_file:
        raise ConfigError("--gin_file says what to sweep; name a file that binds Sweep")
    bound, resolve = command_line.variants(args, "Sweep")
    sweep = settings.from_bindings(bound)
    found = points.expand(sweep, resolve)
    chosen = points.choose(found, args.array_index)
    workdir = Path(args.workdir or f"runs/{Path(args.gin_file[0]).stem}")
    if args.print_config:
        print(command_line.annotated_text(*chosen[0].resolved[:2]), end="")
    elif args.list:
        print(points.listing(chosen))
    elif args.slurm is not None or args.submit:
        from brt.sweeping import slurm

        text = slurm.script(len(found), workdir, args.gin_file, args.gin_bindings, args.slurm or "")
        print(slurm.submit(text, workdir) if args.submit else text)
    else:
        from brt.sweeping import job

        if args.report:
            print(job.write_report(workdir, found, sweep))
        else:
            print(job.run(workdir, found, chosen, sweep, jobs=args.jobs))


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(f"{__doc__}\n{settings.__doc__}")
    command_line.add_config_flags(flags)
    flags.add_argument("--jobs", type=int, default=1, help="points side by side; default 1")
    flags.add_argument("--list", action="store_true", help="show the points, run nothing")
    flags.add_argument("--report", action="store_true", help="only write the report anew")
    flags.add_argument("--array_index", type=int, metavar="I", help="run this point only")
    flags.add_argument(
        "--slurm", nargs="?", const="", metavar="OPTIONS",
        help="print a job array, a task for each point; OPTIONS are sbatch's: '--gres=gpu:1'",
    )  # fmt: skip
    flags.add_argument("--submit", action="store_true", help="hand that script to sbatch")
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
