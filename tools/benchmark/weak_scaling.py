"""Tokens a second of two processes over those of one, each on a core and with lanes of its own.

Beside them two runs that know nothing of each other: what this machine's cores lose by sharing
caches and memory, and threads of one core by sharing that.

python tools/benchmark/weak_scaling.py --rounds 3

Interleaved rounds, medians of the intervals of metrics.jsonl; on a machine with two idle cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANES = 4  # of a process
SETTINGS = {
    "Model.layers": 4, "Recurrence.layers": "(2,)", "Model.model_dim": 256, "Model.heads": 4,
    "Model.head_dim": 64, "Model.mlp_dim": 1024, "Model.window": 128, "Recurrence.states": 128,
    "Training.segment_length": 512, "Training.log_every": 5, "Training.evaluate_every": 0,
    "Training.sample_every": 0, "Training.probe_every": 0, "Training.plots": False,
    "Checkpoint.every": 0, "Optimizer.name": "'adafactor'", "Optimizer.warmup_steps": 5,
    "Mesh.data": -1,
}  # fmt: skip


def command(processes: int, steps: int, place: Path) -> list[str]:
    bound = {**SETTINGS, "Training.steps": steps, "Training.batch_size": LANES * processes}
    return [
        sys.executable, str(ROOT / "launch/local/run_processes.py"), f"--processes={processes}",
        "--pin", "--", sys.executable, "-m", "brt.train", f"--workdir={place}",
        *(f"--gin_bindings={name} = {value}" for name, value in bound.items()),
    ]  # fmt: skip


def speed(processes: int, steps: int, place: Path) -> float:
    """Tokens a second: the median of the intervals but the first, which warms up."""
    one = command(processes, steps, place)
    done = subprocess.run(one, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stdout)
    return measured(place)


def apart(steps: int, place: Path) -> float:
    """Of two runs on a core each, at the same time, together."""
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
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["perf/tokens_per_second"] for row in rows[1:])


def main() -> None:
    args = parser().parse_args()
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


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=40)
    return flags


if __name__ == "__main__":
    main()
