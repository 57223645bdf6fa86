"""Plans the paper's models for slices of 1 to 512 chips, and prints tables of them.

python tools/benchmark/scaling.py --json=scaling.json   # low effort: hours less than --full
python tools/benchmark/scaling.py --steps               # ratios of Rec and Feedback to Slide:13L

All figures are estimates of the compiler. Nothing runs on any chip.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conditions import report
from flags import parser

PAPER = ("--gin_file=configs/base/paper.gin", "--gin_bindings=Model.vocab_size = 32000")
MODELS = {
    "151M": (*PAPER, "--gin_file=configs/models/rec_fixed_skip.gin"),
    "320M": (
        "--gin_file=configs/base/large.gin", "--gin_file=configs/models/rec_fixed_skip.gin",
        "--gin_bindings=Model.vocab_size = 32000",
    ),
    "1.3B": ("--gin_file=configs/base/huge.gin", "--gin_bindings=Model.vocab_size = 32000"),
}  # fmt: skip
SLICES = {
    "v4": {1: "1x1x1", 16: "2x2x4", 128: "4x4x8", 512: "8x8x8"},
    "v5e": {1: "1x1", 16: "4x4", 128: "8x16", 256: "16x16"},
    "v5p": {1: "1x1x1", 16: "2x2x4", 128: "4x4x8", 512: "8x8x8"},
    "v6e": {1: "1x1", 16: "4x4", 128: "8x16", 256: "16x16"},
}
SHARED = 16  # devices that share the parameters of the largest model
STEPS = {
    "Slide:13L": ("--gin_bindings=Model.layers = 13",),
    "Rec:fixed:skip": ("--gin_file=configs/models/rec_fixed_skip.gin",),
    "Feedback:fixed:skip": (
        "--gin_file=configs/models/rec_fixed_skip.gin", "--gin_bindings=Model.feedback = True",
    ),
}  # fmt: skip
# Relative step times in Table 1 of the paper.
MEASURED = {"Slide:13L": 1.0, "Rec:fixed:skip": 0.99, "Feedback:fixed:skip": 1.35}


def planned(topology: str, *flags: str) -> dict[str, Any]:
    """Returns the figures of brt.plan, or {"error": ...} if it fails."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "plan.json"
        command = [sys.executable, "-m", "brt.plan", f"--topology={topology}", f"--json={path}"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True)
        if done.returncode:
            return {"error": done.stderr.strip().split("\n")[-1]}
        return json.loads(path.read_text())


def of_size(model: str, chip: str, count: int, effort: str) -> dict[str, Any]:
    """Plans a model for `count` chips with one sequence per chip."""
    fsdp = min(count, SHARED) if model == "1.3B" else 1
    bindings = {"Mesh.fsdp": fsdp, "Mesh.data": count // fsdp, "Training.batch_size": count}
    flags = [f"--gin_bindings={name} = {value}" for name, value in bindings.items()]
    topology = f"{chip}:{SLICES[chip][count]}"
    found = planned(topology, *MODELS[model], *flags, f"--effort={effort}")
    return {"model": model, "chip": chip, "count": count, **found}


def row(found: dict[str, Any]) -> str:
    """Returns a plan as a line of the Markdown table."""
    head = f"| {found['model']} | {found['chip']} | {found['count']} |"
    if "error" in found:
        return f"{head} {found['error']} |"
    gib, paces = 1 << 30, found["step_seconds"]
    mesh = " x ".join(f"{axis} {n}" for axis, n in found["mesh"].items() if n > 1) or "-"
    state = (found["parameter_bytes"] + found["optimizer_bytes"]) / gib
    moved = ", ".join(
        f"{kind} {x['bytes'] / 1e9:.2f}" for kind, x in sorted(found["collectives"].items())
    )
    pace = paces.get("compiler", paces["roofline"])
    return (
        f"{head} {mesh} | {state:.2f} | {found['temporary_bytes'] / gib:.2f} | "
        f"{found['peak_bytes'] / gib:.2f} of {found['chip_bytes'] / gib:.0f} | {moved or '-'} | "
        f"{1e3 * pace:.0f} | {found['tokens_per_step'] / pace / 1e3:,.0f} |"
    )


def main() -> None:
    flags = parser(
        __doc__, full=(False, "cycles, too, in five times the time"),
        steps=(False, "the ratios of step times instead"),
    )  # fmt: skip
    flags.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    flags.add_argument("--chips", nargs="+", choices=list(SLICES), default=list(SLICES))
    flags.add_argument("--counts", nargs="+", type=int, help="of chips; default: all")
    flags.add_argument("--topologies", nargs="+", default=["v4:2x4x4"], help="of --steps")
    args = flags.parse_args()
    found = []
    if args.steps:
        print("| model | " + " | ".join(f"{t}, Mcycles" for t in args.topologies) + " | paper |")
        cycles = {
            name: [
                planned(t, *PAPER, *flags, "--gin_bindings=Mesh.data = -1").get("cycles") or 0
                for t in args.topologies
            ]
            for name, flags in STEPS.items()
        }
        for name, values in cycles.items():
            cells = (
                f"{v / 1e6:.1f} ({v / (first or 1):.2f})"
                for v, first in zip(values, cycles["Slide:13L"], strict=True)
            )
            print(f"| {name} | {' | '.join(cells)} | {MEASURED[name]:.2f} |", flush=True)
        return
    for model in args.models:
        for chip in args.chips:
            for count in set(args.counts or SLICES[chip]) & SLICES[chip].keys():
                found.append(of_size(model, chip, count, "full" if args.full else "low"))
                print(row(found[-1]), flush=True)
    report(args, found, devices=", ".join(args.chips))


if __name__ == "__main__":
    main()
