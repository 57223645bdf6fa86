"""Command line flags of commands that may be one of several processes."""

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `start` reads to the parser of a command."""
    parser.add_argument("--coordinator_address", metavar="HOST:PORT", help="address of process 0")
    parser.add_argument("--process_count", type=int, metavar="N", help="number of processes")
    parser.add_argument(
        "--process_index", type=int, metavar="I", help="index of this process, from 0"
    )
    parser.add_argument(
        "--distributed", action="store_true",
        help="take these three from the cluster (TPU, Kubernetes, SLURM, Open MPI)",
    )  # fmt: skip


def start(args: argparse.Namespace) -> None:
    """Connects this process to the others that the flags or the cluster name.

    Without such flags and such a cluster, the process stays alone. `processes.start` lists the
    errors.
    """
    # The import is here because it loads jax, which --help does not need.
    from brt.distributed import processes

    names = processes.Launch._fields
    processes.start(processes.Launch(*(getattr(args, name) for name in names)))
