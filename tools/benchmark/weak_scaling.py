"""Tokens a second of two processes over those of one, each on a core and with lanes of its own.

python tools/benchmark/weak_scaling.py --rounds 3

Interleaved rounds, medians of the intervals of metrics.jsonl; on a machine with two idle cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANES = 4  # of a process
SETTINGS = {
    "Model.layers": 4, "Model.recurrent_layers": "(2,)", "Model.model_dim": 256, "Model.heads": 4,
    "Model.head_dim": 64, "Model.mlp_dim": 1024, "Model.window": 128, "Model.states": 128,
    "Training.segment_length": 512, "Training.log_every": 5, "Training.evaluate_every": 0,
    "Training.sample_every": 0, "Training.probe_every": 0, "Training.plots": False,
    "Checkpoint.every": 0, "Optimizer.name": "'adafactor'", "Optimizer.warmup_steps": 5,
    "Mesh.data": -1,
}  # fmt: skip


def speed(processes: int, steps: int, place: Path) -> float:
    """Tokens a second: the median of the intervals but the first, which warms up."""
    bound = {**SETTINGS, "Training.steps": steps, "Training.batch_size": LANES * processes}
    command = [
        sys.executable, str(ROOT / "launch/local/run_processes.py"), f"--processes={processes}",
        "--pin", "--", sys.executable, "-m", "brt.train", f"--workdir={place}",
        *(f"--gin_bindings={name} = {value}" for name, value in bound.items()),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stdout)
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["perf/tokens_per_second"] for row in rows[1:])


def main() -> None:
    args = parser().parse_args()
    found: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(args.rounds):
        for processes in found:
            with tempfile.TemporaryDirectory() as place:
                found[processes].append(speed(processes, args.steps, Path(place) / "run"))
    one, two = (statistics.median(speeds) for speeds in found.values())
    print("| processes | tokens/s | of so many times one |\n|---|---|---|")
    print(f"| 1 | {one:,.0f} | 1 |\n| 2 | {two:,.0f} | {two / (2 * one):.2f} |")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=40)
    return flags


if __name__ == "__main__":
    main()
