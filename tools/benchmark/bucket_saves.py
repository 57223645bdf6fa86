"""Measures what a run directory in a bucket costs, with a server of buckets on this machine.

    python tools/benchmark/bucket_saves.py --saves=0              # the overhead, in eight minutes
    python tools/benchmark/bucket_saves.py --rounds=0             # memory and disk over 1,000 saves

The server answers each request after --delay seconds, and --errors of 1,000 requests by an error.
In each round, --steps steps of about --seconds seconds run twice, with a checkpoint every --every
steps and a line of metrics each step: in a directory and in a bucket, which takes turns in coming
first. The interval of their ratio has a probability of 95 %, if the rounds are independent. Then
--saves checkpoints are saved in a bucket that answers at once, and memory, local disk and the
objects of the bucket are measured on the way.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from conditions import report
from flags import parser
from timing import show

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from buckets import environment  # noqa: E402

from brt import command_line, storage  # noqa: E402
from brt.checkpointing.writer import CheckpointWriter  # noqa: E402
from brt.storage.objects import Bucket  # noqa: E402
from brt.storage.places import parse  # noqa: E402


@contextlib.contextmanager
def server(*flags: str) -> Iterator[None]:
    command = [sys.executable, str(ROOT / "tests/buckets.py"), "--port=0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        os.environ.update(environment(f"http://127.0.0.1:{process.stdout.readline().strip()}"))
        yield
        process.terminate()


@jax.jit
def product(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x)


def products_in(seconds: float) -> int:
    """Returns how many products take so long on this machine."""
    x = product(jnp.ones((1000, 1000))).block_until_ready()
    begin = time.perf_counter()
    for _ in range(20):
        x = product(x)
    x.block_until_ready()
    return max(1, round(20 * seconds / (time.perf_counter() - begin)))


def trained(place: str, products: int, steps: int, every: int) -> float:
    """Returns the seconds of a run with a state of 4 MB, whose steps are a number of products."""
    path = Path(storage.local(place))
    path.mkdir(parents=True, exist_ok=True)
    x = jnp.full((1000, 1000), 1e-3)
    with (
        storage.of(path).held(print),
        CheckpointWriter(path / "checkpoints", keep=2) as writer,
        (path / "metrics.jsonl").open("w") as metrics,
    ):
        begin = time.perf_counter()
        for number in range(1, steps + 1):
            for _ in range(products):
                x = product(x)
            x.block_until_ready()
            print(json.dumps({"step": number}), file=metrics, flush=True)
            if not number % every:
                writer.save(number, {"x": x}, {})
            writer.check()
        return time.perf_counter() - begin


def saved(saves: int) -> list[dict[str, float]]:
    """Saves checkpoints of 1 MB; returns what they have taken after each tenth of them."""
    path = Path(storage.local("gs://bucket/saves"))
    path.mkdir()
    rows = []
    with (
        storage.of(path).held(print),
        CheckpointWriter(path / "checkpoints", keep=2) as writer,
    ):
        for number in range(1, saves + 1):
            writer.save(number, {"x": jnp.full((256, 1024), float(number))}, {})
            if not number % max(1, saves // 10):
                writer.wait()
                gc.collect()
                rows.append(
                    {
                        "saves": number,
                        "resident MB": _resident() / 1e6,
                        "local MB": sum(f.stat().st_size for f in path.rglob("*")) / 1e6,
                        "objects": len(Bucket(parse("gs://bucket/saves")).keys()),
                    }
                )
    return rows


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean, and half the width of its interval of 95 % by Student's t."""
    quantile = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
    count = len(values)
    if count == 1:
        return values[0], math.inf
    error = statistics.stdev(values) / math.sqrt(count)
    return statistics.mean(values), quantile.get(count, 2.31) * error


def main(args: argparse.Namespace) -> None:
    products = products_in(args.seconds) if args.rounds else 0
    ratios: list[float] = []
    faults = f"--delay={args.delay}", f"--errors={args.errors}"
    with server(*faults), tempfile.TemporaryDirectory() as d:
        for number in range(args.rounds):
            places = {"here": f"{d}/{number}", "there": f"gs://bucket/{number}"}
            times = {
                name: trained(places[name], products, args.steps, args.every)
                for name in sorted(places, reverse=bool(number % 2))
            }
            here, there = times["here"], times["there"]
            ratios.append(there / here)
            print(f"round {number + 1}: {here:.2f} s, in the bucket {there:.2f} s")
    storage.discard_all()
    with server():
        rows = saved(args.saves) if args.saves else []
    storage.discard_all()
    if ratios:
        mean, half = interval(ratios)
        row = {"overhead %": 100 * (mean - 1), "from": 100 * (mean - half - 1)}
        row["to"] = 100 * (mean + half - 1)
        show(f"steps of {args.seconds:g} s in a bucket, beyond those in a directory", [row])
    if rows:
        show("saves in a bucket", rows)
    report(args, {"ratios": ratios, "saves": rows})


if __name__ == "__main__":
    flags = parser(
        __doc__, delay=(0.1, "seconds before each answer"), errors=(10, "of 1,000 requests"),
        seconds=(1.0, "of a step"), steps=40, every=(20, "steps between saves"), rounds=6,
        saves=(1000, "whose memory and disk are measured"),
    )  # fmt: skip
    command_line.main(main, flags)
