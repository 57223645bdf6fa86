#!/usr/bin/env python3
"""Runs a command of brt as several processes on this machine, each with fake CPU devices.

This is a small version of a run on a cluster. For example, two processes train together with

  python launch/local/run_processes.py --processes 2 -- \\
    python -m brt.train --gin_file=configs/runs/quickstart.gin --workdir=runs/two \\
    --gin_bindings='Mesh.data = -1'

SIGTERM and SIGINT are passed on to all processes. The exit code is the highest exit code of the
processes. If it is 75, the same command continues the run.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TextIO

# After a process has failed, the other processes are killed if they have not ended in this time.
PATIENCE_SECONDS = 90


def main() -> int:
    args = parser().parse_args()
    command = [part for part in args.command if part != "--"]
    if not command:
        sys.exit("run_processes: name a command behind --, such as python -m brt.train ...")
    port = args.port or free_port()
    commands = [
        [*command, f"--coordinator_address=localhost:{port}", f"--process_count={args.processes}",
         f"--process_index={index}"]
        for index in range(args.processes)
    ]  # fmt: skip
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(args.devices_per_process)}
    if args.dry_run:
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        print(*(f"{shown} {shlex.join(one)}" for one in commands), sep="\n")
        return 0
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    running = []
    for index, one in enumerate(commands):
        pinned = ["taskset", "-c", str(cores[index % len(cores)])] if args.pin and cores else []
        running.append(
            subprocess.Popen(
                [*pinned, *one], env=os.environ | environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: [p.send_signal(received) for p in running])
    readers = [
        threading.Thread(target=show, args=(index, process.stdout))
        for index, process in enumerate(running)
    ]
    for reader in readers:
        reader.start()
    while all(process.poll() in (None, 0) for process in running):
        if all(process.poll() == 0 for process in running):
            break
        time.sleep(0.2)
    codes = [end(process) for process in running]
    for reader in readers:
        reader.join()
    return max(128 - code if code < 0 else code for code in codes)


def show(index: int, lines: TextIO) -> None:
    """Prints each line of a process with its index, except for messages of the library Gloo."""
    for line in lines:
        if "[Gloo] Rank" in line:
            continue
        print(f"[{index}] {line}", end="", flush=True)


def end(process: subprocess.Popen) -> int:
    """Waits for a process and returns its exit code; kills the process if it takes too long."""
    try:
        return process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def flags(devices: int) -> str:
    own = os.environ.get("XLA_FLAGS", "")
    return f"{own} --xla_force_host_platform_device_count={devices}".strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--processes", type=int, default=2, help="how many; default 2")
    flags.add_argument("--devices_per_process", type=int, default=1, help="each; default 1")
    flags.add_argument("--port", type=int, help="of process 0; default: a free one")
    flags.add_argument("--pin", action="store_true", help="each to a core of its own")
    flags.add_argument("--dry_run", action="store_true", help="only print what would be run")
    flags.add_argument("command", nargs=argparse.REMAINDER, help="behind --")
    return flags


if __name__ == "__main__":
    sys.exit(main())
