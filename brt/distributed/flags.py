"""Command line flags of commands that may be one of several processes."""

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `start` reads to a parser."""
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
    """Connects to the other processes that the flags or the cluster name; see `processes.start`."""
    from brt.distributed import processes  # This imports jax, which --help does not need.

    names = processes.Launch._fields
    processes.start(processes.Launch(*(getattr(args, name) for name in names)))
