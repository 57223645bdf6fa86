"""Measures what is open on a GPU within minutes, part by part, the most important part first.

    python tools/benchmark/gpu_session.py [--out=gpu_session] [--seconds=600] [--parts=step,levers]
        [--size=paper|small] [--tokens=32768] [--dtype=bfloat16] [--rounds=3]

The parts are

    step       the train steps of Slide:13L and Rec:fixed:skip with dropout, by train_step.py
    profile    the kernels of a step of Rec:fixed:skip, each beside its bound (as in brt.plan)
    levers     the same step with one change of its program at a time, in turns with the usual one
    plain      the steps without dropout
    attention  window attention beside cuDNN, torch, flash_attn and tokamax, by attention.py
    errors     values and gradients of all kernels, by gpu_errors.py
    times      attention of encoders and states, by gpu_times.py

Each part writes a file to --out, and session.json joins them; parts whose file exists are not run.
On CPUs, --size=small --tokens=64 --dtype=float32 runs the code.
"""

import argparse
import collections
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from conditions import report
from flags import parser
from timing import interleaved, ratio, show
from train_step import Contestant, of_row

from brt import command_line
from brt.errors import ConfigError
from brt.ops import compiler_options, dispatch
from brt.planning import compiled
from brt.planning.topologies import CHIPS

HERE = Path(__file__).parent
MODEL, DROPOUT = "Rec:fixed:skip", "Model.dropout = 0.05"
CHIP = CHIPS["h100"]  # of the bounds
STEPS, LISTED = 3, 40  # numbers of steps in a profile, and of the kernels of it that are printed
# The changes of each lever: fields of `dispatch.BackendPolicy`, options of the compiler, bindings.
LEVERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "logits in float32": ({"rounds_logits": False}, {}, []),
    "elementwise results recomputed": ({"recomputes_elementwise": True}, {}, []),
    "layers in separate arrays": ({"separates_layers": True}, {}, []),
    "products by cuBLAS": ({}, {"xla_gpu_enable_triton_gemm": False}, []),
    "no command buffers": ({}, {"xla_gpu_enable_command_buffer": ""}, []),
    "attention in plain XLA": ({}, {}, ["Kernels.use = 'window_attention=xla'"]),
}


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the script and the flags of each part."""
    lanes, length = max(args.tokens // 4096, 1), max(min(args.tokens, 4096), 512)
    rounds, dtype = f"--rounds={args.rounds}", f"--dtype={args.dtype}"
    sizes = [rounds, dtype, f"--size={args.size}", f"--tokens={args.tokens}"]
    step = ["train_step.py", *sizes, f"--models=Slide:13L,{MODEL}"]
    own = ["gpu_session.py", *sizes]
    return {
        "step": [*step, f"--gin_bindings={DROPOUT}"],
        "profile": [*own, "--run=profile"],
        "levers": [*own, "--run=levers"],
        "plain": step,
        "attention": ["attention.py", rounds, dtype, f"--lanes={lanes}", f"--tokens={length}"],
        "errors": ["gpu_errors.py"],
        "times": ["gpu_times.py", rounds],
    }


def main(args: argparse.Namespace) -> int:
    if args.run:
        found, model = {"profile": profile, "levers": levers}[args.run](args)
        report(args, found, {MODEL: model})
        return 0
    known = commands(args)
    names = args.parts.split(",") if args.parts else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--parts={unknown[0]} is not known; the parts are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + args.seconds, {}
    for name in names:
        if (args.out / f"{name}.json").exists():
            print(f"{name}: is there")
        elif why := run_part(name, known[name], args.out, end - time.monotonic()):
            failed[name] = why
            print(f"{name} is missing: {why}")
        files = {name: args.out / f"{name}.json" for name in known}
        found = {name: json.loads(x.read_text()) for name, x in files.items() if x.exists()}
        text = json.dumps({"parts": found, "missing": failed}, indent=1)
        (args.out / "session.json").write_text(text + "\n")
    return 1 if failed else 0


def run_part(name: str, command: list[str], out: Path, seconds: float) -> str:
    """Runs a part, prints what it prints, and returns why it failed, or ""."""
    print(f"{name}: {' '.join(command)}", flush=True)
    last, (script, *flags) = "", [*command, f"--json={out / name}.json"]
    words = [sys.executable, HERE / script, *flags]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, text=True, **streams) as process:
        watch = threading.Timer(max(seconds, 0), process.kill)
        watch.start()
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        watch.cancel()
    killed = process.returncode == -signal.SIGKILL
    return f"its {seconds:.0f} s were over" if killed else last if process.returncode else ""


def contestant(args: argparse.Namespace, lever: str = "") -> Contestant:
    """Compiles MODEL's step with dropout and the changes of a lever ("": none)."""
    fields, added, bindings = LEVERS[lever] if lever else ({}, {}, [])
    config, _ = of_row(MODEL, args, [DROPOUT, *bindings])
    policy = {dispatch.backend(): dispatch.policy()._replace(**fields)}
    options = {**compiler_options.options(config.model.model_dim), **added}
    jax.clear_caches()  # The cache of traces ignores the policy.
    replaced = mock.patch.object(compiler_options, "options", lambda _: options)
    with mock.patch.dict(dispatch._POLICIES, policy), replaced:
        return Contestant(config)


def levers(args: argparse.Namespace) -> tuple[list[dict[str, Any]], Any]:
    """Returns a row for each lever: its step beside the usual one, in the same rounds."""
    base, rows = contestant(args), []
    for name in LEVERS:
        try:
            other = contestant(args, name)
            times = interleaved({"usual": base.run, name: other.run}, args.rounds)
            usual, changed = (statistics.median(own) for own in times.values())
            numbers = {"usual ms": usual, "ms": changed, "of usual": ratio(times, name, "usual")}
            rows.append({"lever": name, **numbers, "GiB": other.bytes / 2**30})
        except Exception as error:  # Whatever a compiler raises, it cannot run this step.
            rows.append({"lever": name, "cannot run": str(error).splitlines()[0]})
        show(name, rows[-1:])
        with contextlib.redirect_stdout(None):  # The rows stay if the time is over.
            report(args, rows, {MODEL: base.model})
    return rows, base.model


def profile(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Returns the times of the longest kernels of a step beside their bounds."""
    one = contestant(args)
    jax.block_until_ready(one.run())
    with tempfile.TemporaryDirectory() as place:
        with jax.profiler.trace(place):
            jax.block_until_ready([one.run() for _ in range(STEPS)])
        (file,) = Path(place).rglob("*.xplane.pb")
        times = kernel_times(jax.profiler.ProfileData.from_file(str(file)))
    rows = beside_bounds(times, one.step.as_text())
    show(f"The {LISTED} longest kernels of {len(rows)}", rows[:LISTED])
    total = {key: sum(row[key] for row in rows) for key in ("times", "ms", "bound ms", "GB")}
    show("All of them", [total])
    return {"total": total, "kernels": rows}, one.model


def kernel_times(data: Any) -> dict[str, list[float]]:
    """Returns the milliseconds of each execution of each instruction in a profile, by its name."""
    planes = [x for x in data.planes if x.name.startswith("/device:GPU")] or list(data.planes)
    found: dict[str, list[float]] = collections.defaultdict(list)
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        if name := dict(event.stats).get("hlo_op"):
            found[str(name)].append(event.duration_ns / 1e6)
    return found


def beside_bounds(times: dict[str, list[float]], text: str) -> list[dict[str, Any]]:
    """Returns a row for each instruction in the profile of a compiled step, the longest first."""
    module, rows = compiled.Module(text), []
    for computation, instruction, _ in module.executed_instructions():
        own = times.pop(instruction.name, [])
        cost = compiled.instruction_cost(module, computation, instruction, CHIP.name)
        runs, bound = len(own) / STEPS, 1e3 * cost.cycles / CHIP.clock
        rows.append({
            "kernel": instruction.name, "part": compiled.part_of(instruction.source),
            "times": runs, "ms": sum(own) / STEPS, "bound ms": runs * bound,
            "GB": runs * cost.bytes / 1e9, "TFLOP": runs * cost.flops / 1e12,
        })  # fmt: skip
    return sorted((row for row in rows if row["times"]), key=lambda row: -row["ms"])


if __name__ == "__main__":
    flags = parser(
        __doc__, seconds=(600.0, "for all parts"), parts=("", "separated by commas; all"),
        size=("paper", "or small"), tokens=(32768, "per step"), dtype="bfloat16", rounds=3,
    )  # fmt: skip
    flags.add_argument("--out", type=Path, default=Path("gpu_session"), help="folder of results")
    flags.add_argument("--run", choices=("profile", "levers"), help=argparse.SUPPRESS)
    command_line.main(main, flags)
