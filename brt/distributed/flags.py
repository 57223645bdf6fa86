"""What tells a command that it is one of several processes."""

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `start` reads."""
    parser.add_argument("--coordinator_address", metavar="HOST:PORT", help="of process 0")
    parser.add_argument("--process_count", type=int, metavar="N", help="of the whole run")
    parser.add_argument("--process_index", type=int, metavar="I", help="of this one, from 0")
    parser.add_argument(
        "--distributed", action="store_true",
        help="the cluster (TPU, Kubernetes, SLURM, Open MPI) says the three",
    )  # fmt: skip


def start(args: argparse.Namespace) -> None:
    """Finds the other processes that the flags, or the cluster, speak of; see `processes.start`."""
    from brt.distributed import processes  # takes jax, which --help does not need

    names = processes.Launch._fields
    processes.start(processes.Launch(*(getattr(args, name) for name in names)))
