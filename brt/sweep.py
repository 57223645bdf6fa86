"""Trains a model with many settings, each in a process of its own, and compares the results.

python -m brt.sweep --gin_file=configs/sweeps/gates.gin --jobs=2

If the command is run again, it continues with the points that are not finished.
"""

import argparse
from pathlib import Path

from brt import command_line, output
from brt.errors import ConfigError
from brt.sweeping import points


def main(args: argparse.Namespace) -> None:
    """Runs the points (runs) of a sweep, or lists them, or writes the report of their results."""
    if not args.gin_file:
        raise ConfigError("--gin_file names the sweep; give a file that binds Sweep")
    bound, resolve = command_line.section_and_variant_resolver(args, "Sweep")
    sweep = points.from_bindings(bound)
    all_points = points.expand(sweep, resolve)
    chosen = points.choose(all_points, args.array_index)
    workdir = Path(args.workdir or f"runs/{Path(args.gin_file[0]).stem}")
    if args.print_config:
        output.show(command_line.described(*chosen[0].resolved[:2]), end="")
    elif args.list:
        output.show(points.listing(chosen))
    elif args.slurm is not None or args.submit:
        from brt.sweeping import slurm

        text = slurm.script(
            len(all_points), workdir, args.gin_file, args.gin_bindings, args.slurm or ""
        )
        output.pass_on(slurm.submit(text, workdir) if args.submit else text, end="\n")
    else:
        from brt.sweeping import job

        if args.report:
            output.show(job.write_report(workdir, all_points, sweep))
        else:
            output.show(job.run(workdir, all_points, chosen, sweep, jobs=args.jobs))


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(f"{__doc__}\n{points.__doc__}")
    command_line.add_config_flags(flags)
    flags.add_argument("--jobs", type=int, default=1, help="points to run in parallel; default 1")
    flags.add_argument("--list", action="store_true", help="only list the points")
    flags.add_argument("--report", action="store_true", help="only write the report again")
    flags.add_argument("--array_index", type=int, metavar="I", help="run only this point")
    flags.add_argument(
        "--slurm", nargs="?", const="", metavar="OPTIONS",
        help="print a job array with a task for each point; OPTIONS are for sbatch: '--gres=gpu:1'",
    )  # fmt: skip
    flags.add_argument("--submit", action="store_true", help="submit the job array with sbatch")
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
