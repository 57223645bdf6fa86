"""Measures the window attention of brt, jax.nn and torch, forward and with gradients.

    python tools/benchmark/attention.py [--lanes=32] [--tokens=4096] [--window=512] [--heads=8]
        [--head_dim=128] [--dtype=bfloat16] [--rounds=5] [--only=brt,torch] [--json=FILE]

Each framework runs in a process of its own. The processes and their implementations take turns.
Times are medians over the rounds; a ratio is the median of the ratios within a round.
Implementations that cannot run on this machine are listed with the reason.

TFLOP/s count one window of keys for each query, with two products in the forward pass and four in
the backward pass. The error is the largest one of the output and the gradients in the first lane:
the distance from a float64 result, divided by the largest number of the array. jax.nn (except
`cudnn, no bias`) and torch sdpa know no windows. There, each block attends to itself and the
previous block, and the bias is part of the mask. Rows without a gradient of the bias compute less
than the others; their times are only lower bounds.
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
from conditions import report
from flags import parser
from timing import interleaved, ratio, show

from brt import runtime

FRAMEWORKS = ("jax", "torch")
LEAST = 1.0  # milliseconds that one measurement takes at least
Row = dict[str, Any]


class Worker:
    """A process that measures one framework, and answers each line of input with a line of JSON."""

    def __init__(self, framework: str, sizes: Sizes, only: str):
        command = [sys.executable, __file__, f"--serve={framework}", f"--only={only}"]
        command += [f"--{name}={value}" for name, value in sizes._asdict().items()]
        own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # Processes share the device.
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
    """Runs as the process of a framework.

    Prints a line of JSON with the device, the facts about each implementation, and the reasons
    why others are absent. Then it reads lines with "forward" or "both" from stdin, and prints the
    milliseconds of one round of each implementation.

    Args:
      framework: "jax" or "torch".
      sizes: sizes of the arrays.
      only: parts of names; implementations whose name contains none of them are left out.
    """
    # Frameworks print messages, which must not be taken for answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    runtime.keep_memory()
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
    """Returns how many calls of the fastest function take the time LEAST."""
    times = interleaved(functions, 1)
    return max((math.ceil(LEAST / min(own)) for own in times.values()), default=1)


def main() -> None:
    flags = parser(
        __doc__, lanes=32, tokens=4096, window=512, heads=8, head_dim=128, dtype="bfloat16",
        rounds=5, only=("", "parts of names, as brt or no bias"),
    )  # fmt: skip
    flags.add_argument("--serve", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    args = flags.parse_args()
    sizes = Sizes(*(getattr(args, name) for name in Sizes._fields))
    if sizes.tokens % sizes.window:
        flags.error(f"--tokens={sizes.tokens} must be a multiple of --window={sizes.window}")
    if args.serve:
        serve(args.serve, sizes, args.only.split(","))
        return
    runtime.use_cpu_without_accelerator()  # The processes inherit this choice.
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
    devices = ", ".join(one["device"] for one in said)
    report(args, {"rows": rows, "absent": absent}, devices=devices)


def row(name: str, facts: Row, times: dict[str, dict[str, list[float]]], sizes: Sizes) -> Row:
    """Returns the row of an implementation for the table."""
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
    """Returns name and clock rates of NVIDIA GPUs, because the times depend on them."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,clocks.sm,clocks.mem", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    main()
