"""Estimates whether a run fits on a machine and how fast it would be, without the machine.

python -m brt.plan --gin_file=configs/base/paper.gin --gin_file=configs/models/rec_fixed_skip.gin \\
  --gin_bindings='Model.vocab_size = 32000' --gin_bindings='Mesh.data = -1' --topology=v4:2x4x4
python -m brt.plan --gin_file=configs/runs/quickstart.gin --devices=8   # fake CPUs
"""

import argparse

from brt import command_line, output, runtime
from brt.errors import ConfigError


def main(args: argparse.Namespace) -> None:
    """Prints the plan of a run or, with --sweep_mesh, the best meshes of devices for the run."""
    if args.topology and args.devices is not None:
        raise ConfigError("--topology and --devices name two machines; use one of them")
    _choose_platform(args)
    from brt.planning import plan, topologies
    from brt.training import workdir

    base = workdir.saved_config(args.workdir) if args.workdir and not args.gin_file else None
    config = command_line.resolve(args, base=base).config
    machine = topologies.named(args.topology) if args.topology else topologies.present()
    if args.sweep_mesh:
        tried = plan.sweep(config, machine, lambda line: output.say(f"brt: {line}"))
        output.show(plan.best_meshes(tried))
        content = {"best": [plan.plan_json(one) for one in tried]}
    else:
        planned = plan.plan(config, machine, low_effort=args.effort == "low")
        output.show(plan.plan_text(planned, config))
        content = plan.plan_json(planned)
    if args.json:
        command_line.write_json(args.json, content, args.workdir)


def _choose_platform(args: argparse.Namespace) -> None:
    """Makes jax use the CPU if the flags name another machine. Accelerators then stay free."""
    if args.devices is not None:
        if args.devices < 1:
            raise ConfigError(f"--devices={args.devices} must be above 0")
    if args.topology or args.devices is not None:
        runtime.use_cpus(args.devices)


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    command_line.add_config_flags(flags)
    flags.add_argument(
        "--topology", metavar="NAME",
        help="a TPU slice (v4:2x4x4, v5e:16x16, v5p:2x2x4, v6e:4x4) or GPUs (h100x8); "
        "default: the devices of this machine",
    )  # fmt: skip
    flags.add_argument("--devices", type=int, metavar="N", help="plan for N fake CPU devices")
    flags.add_argument(
        "--sweep_mesh", action="store_true",
        help="try all meshes that divide the devices, and print the best three",
    )  # fmt: skip
    flags.add_argument(
        "--effort", choices=["full", "low"], default="full",
        help="low: a fifth of the time; memory and collectives are correct, cycles are left out",
    )  # fmt: skip
    command_line.add_json_flag(flags)
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
