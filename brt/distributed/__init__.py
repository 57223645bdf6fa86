"""Runs on several devices and processes: the mesh, sharding rules, and coordination.

The functions of this file are for commands that several processes may run together.
"""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
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
    """Connects this process to the other processes of the run, as the flags or the cluster say.

    Without these flags and outside of a cluster with several processes, the function does nothing.
    """
    # The import is inside the function because it loads jax, which --help does not need.
    from brt.distributed import processes

    names = processes.Launch._fields
    processes.start(processes.Launch(*(getattr(args, name) for name in names)))
