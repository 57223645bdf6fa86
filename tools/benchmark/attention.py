"""Window attention by brt's implementations and by other people's, forward and with gradients.

    python tools/benchmark/attention.py [--lanes=32] [--tokens=4096] [--window=512] [--heads=8]
        [--head_dim=128] [--dtype=bfloat16] [--rounds=5] [--only=brt,torch] [--json=FILE]

A process for each framework; processes and what is in them take turns, a figure is the median over
the rounds, a ratio the median of those within a round. What cannot be here is named.

TFLOP/s count a window of keys for each query, and two products forward and four backward of them.
The error is that of the worst of output and gradients, of the first lane, against float64 and over
the largest number of the array. *blocked* for those that know no windows: jax.nn and torch sdpa
attend from each block to itself and the one before, with the bias as a mask. Rows without a bias
gradient do less: they bound the others, and are not to be compared with them.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from typing import Any

from attention_kinds import Contestant, Sizes, deterministic, error, exact, first_lane, inputs
from timing import interleaved, ratio, show

from brt import allocator, platforms

FRAMEWORKS = ("jax", "torch")
LEAST = 1.0  # milliseconds that are timed at once
Row = dict[str, Any]


class Worker:
    """A process that answers each line with a line of JSON."""

    def __init__(self, framework: str, sizes: Sizes, only: str):
        command = [sys.executable, __file__, f"--serve={framework}", f"--only={only}"]
        command += [f"--{name}={value}" for name, value in sizes._asdict().items()]
        own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # there are others on the device
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | own
        )

    def answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"attention.py: a process ended with {self._process.wait()}, see above")
        return json.loads(line)

    def ask(self, what: str) -> Any:
        assert self._process.stdin
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self._process.communicate()


def serve(framework: str, sizes: Sizes, only: list[str]) -> None:
    """Says what there is, then milliseconds of a round for each line that comes in."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what frameworks print is no answer
    allocator.keep_memory()
    room = importlib.import_module(f"attention_{framework}")
    given = [inputs(sizes, seed) for seed in range(2)]
    expected = {biased: exact(given[0], biased) for biased in (True, False)}
    here: dict[str, Contestant] = {}
    facts, absent = {}, {}
    for name, one in room.contestants(given, sizes):
        if not any(part in name for part in only):
            continue
        if isinstance(one, str):
            absent[name] = one
            continue
        here[name] = one
        found = one.results(first_lane(given[0].gradient))
        facts[name] = {
            "error": error(found, expected[one.biased]),
            "bias gradient": "bias" in found,
            "deterministic": deterministic(one, given[0].gradient),
            "MiB": one.memory and one.memory / 2**20,
        }
        print(f"{name} is there", file=sys.stderr)
    runs = {what: {name: getattr(one, what) for name, one in here.items()}
            for what in ("forward", "both")}  # fmt: skip
    repeats = {what: _repeats(own) for what, own in runs.items()}
    said = {"device": room.device(), "facts": facts, "absent": absent}
    print(json.dumps(said), file=answers, flush=True)
    for line in sys.stdin:
        what = line.strip()
        times = interleaved(runs[what], 1, repeats[what])
        print(json.dumps({name: own[0] for name, own in times.items()}), file=answers, flush=True)


def _repeats(functions: dict[str, Any]) -> int:
    """As many that the quickest takes long enough to be timed."""
    times = interleaved(functions, 1)
    return max((math.ceil(LEAST / min(own)) for own in times.values()), default=1)


def main() -> None:
    flags = parser()
    args = flags.parse_args()
    sizes = Sizes(*(getattr(args, name) for name in Sizes._fields))
    if sizes.tokens % sizes.window:
        flags.error(f"--tokens={sizes.tokens} must be a multiple of --window={sizes.window}")
    if args.serve:
        serve(args.serve, sizes, args.only.split(","))
        return
    platforms.use_cpu_without_accelerator()  # processes inherit it
    there = [name for name in FRAMEWORKS if importlib.util.find_spec(name)]
    absent = {name: "is not installed" for name in FRAMEWORKS if name not in there}
    workers = [Worker(name, sizes, args.only) for name in there]
    said = [worker.answer() for worker in workers]
    times: dict[str, dict[str, list[float]]] = {"forward": {}, "both": {}}
    for _ in range(args.rounds):
        for worker in workers:
            for what, own in times.items():
                for name, milliseconds in worker.ask(what).items():
                    own.setdefault(name, []).append(milliseconds)
    for worker in workers:
        worker.end()
    facts = {name: own for one in said for name, own in one["facts"].items()}
    absent |= {name: why for one in said for name, why in one["absent"].items()}
    rows = [row(name, own, times, sizes) for name, own in facts.items()]
    print("\n".join(dict.fromkeys([*(one["device"] for one in said), *_clocks()])))
    if rows:
        shown = ", ".join(f"{name} {value}" for name, value in sizes._asdict().items())
        show(f"Window attention, {shown}", rows)
    for name, why in absent.items():
        print(f"absent: {name} ({why})")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"sizes": sizes._asdict(), "rows": rows, "absent": absent}, file, indent=1)


def row(name: str, facts: Row, times: dict[str, dict[str, list[float]]], sizes: Sizes) -> Row:
    first = next(iter(times["both"]))
    middle = {what: statistics.median(own[name]) for what, own in times.items()}
    return {
        "kind": name,
        "forward ms": middle["forward"],
        "both ms": middle["both"],
        f"of {first}": ratio(times["both"], name, first),
        "TFLOP/s": sizes.flops("forward") / middle["forward"] / 1e9,
        "both TFLOP/s": sizes.flops("both") / middle["both"] / 1e9,
        "MiB": facts["MiB"] or "-",
        "max error": f"{facts['error']:.1e}",
        "bias gradient": "yes" if facts["bias gradient"] else "no",
        "deterministic": "yes" if facts["deterministic"] else "no",
    }


def _clocks() -> list[str]:
    """Of NVIDIA's devices, which times depend on."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,clocks.sm,clocks.mem", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"lanes": 32, "tokens": 4096, "window": 512, "heads": 8, "head_dim": 128}
    for name, value in sizes.items():
        flags.add_argument(f"--{name}", type=int, default=value)
    flags.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--only", default="", help="parts of names, as brt or no bias")
    flags.add_argument("--json", metavar="FILE", help="write the rows there")
    flags.add_argument("--serve", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    return flags


if __name__ == "__main__":
    main()
