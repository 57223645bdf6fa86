"""Measures weak scaling: tokens per second of two processes in comparison with one process.

Each process runs on a core of its own and has the same number of lanes. Two independent runs at the
same time are measured, too. They show how much speed is lost because cores share caches and memory,
or because two hardware threads share a core.

python tools/benchmark/weak_scaling.py --rounds 3

The three measurements take turns. Speeds are medians over the intervals in metrics.jsonl. The
machine must have two idle cores.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from conditions import report
from flags import parser

ROOT = Path(__file__).resolve().parents[2]
LANES = 4  # of each process
SETTINGS = {
    "Model.layers": 4, "Recurrence.layers": "(2,)", "Model.model_dim": 256, "Model.heads": 4,
    "Model.head_dim": 64, "Model.mlp_dim": 1024, "Model.window": 128, "Recurrence.states": 128,
    "Training.segment_length": 512, "Training.log_every": 5, "Training.evaluate_every": 0,
    "Training.sample_every": 0, "Training.probe_every": 0, "Training.plots": False,
    "Checkpoint.every": 0, "Optimizer.name": "'adafactor'", "Optimizer.warmup_steps": 5,
    "Mesh.data": -1,
}  # fmt: skip


def command(processes: int, steps: int, place: Path) -> list[str]:
    """Returns the command that trains with a number of processes in the workdir `place`."""
    bound = {**SETTINGS, "Training.steps": steps, "Training.batch_size": LANES * processes}
    return [
        sys.executable, str(ROOT / "launch/local/run_processes.py"), f"--processes={processes}",
        "--pin", "--", sys.executable, "-m", "brt.train", f"--workdir={place}",
        *(f"--gin_bindings={name} = {value}" for name, value in bound.items()),
    ]  # fmt: skip


def speed(processes: int, steps: int, place: Path) -> float:
    """Trains with a number of processes and returns the tokens per second."""
    one = command(processes, steps, place)
    done = subprocess.run(one, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stdout)
    return measured(place)


def apart(steps: int, place: Path) -> float:
    """Trains two independent runs at once, each on a core; returns the sum of their speeds."""
    runs = [
        subprocess.Popen(
            ["taskset", "-c", str(core), *command(1, steps, place / str(core))],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
        )
        for core in sorted(os.sched_getaffinity(0))[:2]
    ]  # fmt: skip
    if any([run.wait() for run in runs]):
        sys.exit("a run has failed")
    return sum(measured(path) for path in place.iterdir())


def measured(place: Path) -> float:
    """Returns a run's median tokens per second, without the first interval, which compiles."""
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["perf/tokens_per_second"] for row in rows[1:])


def main() -> None:
    args = parser(__doc__, rounds=3, steps=40).parse_args()
    found: dict[str, list[float]] = {"one": [], "two apart": [], "two together": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as place:
            root = Path(place)
            (root / "apart").mkdir()
            found["one"].append(speed(1, args.steps, root / "one"))
            found["two apart"].append(apart(args.steps, root / "apart"))
            found["two together"].append(speed(2, args.steps, root / "two"))
    speeds = {name: statistics.median(values) for name, values in found.items()}
    print("| processes | tokens/s | of twice one | of two apart |\n|---|---|---|---|")
    for name, value in speeds.items():
        of_one, of_apart = value / (2 * speeds["one"]), value / speeds["two apart"]
        print(f"| {name} | {value:,.0f} | {of_one:.2f} | {of_apart:.2f} |")
    report(args, {"speeds": speeds, "settings": SETTINGS})


if __name__ == "__main__":
    main()
