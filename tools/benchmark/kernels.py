"""Compiles kernels for TPUs, without having one, and prints the lengths of their schedules.

python tools/benchmark/kernels.py                  # 512 tokens, heads of 128, four chips: 4 minutes
python tools/benchmark/kernels.py --chips v5e --window 1024 --head_dim 64
python tools/benchmark/kernels.py --case clustered    # improved, recurrent, loss, ...
python tools/benchmark/kernels.py --case segmented --compare --lanes 16    # with plain XLA
python tools/benchmark/kernels.py --case masked --window 2048    # 4,096 tokens
python tools/benchmark/kernels.py --case local --window 2048 --block 2048 --head_dim 64    # Llama

The length is the number of bundles of instructions in a step of the kernel's grid, such as a head
of a lane's block. A bundle takes one cycle, unless it waits for memory. "In a pass" are the bundles
that only the first or the last step of a pass executes, see `brt.planning.kernel_cycles`. Its
tables, which `brt.plan` uses, contain these numbers. With --compare, the costs of the whole case
are compared with an implementation in plain XLA.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conditions import report
from flags import parser

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1"}
NAME = re.compile(r"\b([a-z_]+_(?:\d+x)+\d+)_[a-z]+\d+_\d+_steps")
CASES = (
    "window", "local", "recurrent", "loss", "masked", "masked_dropout", "segmented", "clustered",
    "improved", "causal", "optimizer",
)  # fmt: skip
# A line of a schedule may begin with the number of a bundle, contain a branch that skips a region
# of instructions, and mark the end of such a region.
BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s")
SKIP = re.compile(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)")
END = re.compile(r"empty region (\d+)")


def main() -> None:
    flags = parser(
        __doc__, chips=list(CHIPS), compare=(False, "with plain XLA, by costs"), lanes=1,
        window=512, block=(0, "of the case local"), head_dim=128,
        vocabulary=(32000, "of the case loss"), dtype="bfloat16",
        implementation=("pallas_tpu", argparse.SUPPRESS),
    )  # fmt: skip
    flags.add_argument("--case", choices=CASES, default="window")
    flags.add_argument("--one", choices=CHIPS, help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.one:
        print(json.dumps(vmem_of(compile_one(args.one, args)[0])))
        return
    found = compare(args) if args.compare else counted(args)
    vars(args).pop("one")
    report(args, found, devices=f"none, compiled for {', '.join(args.chips)}")


def counted(args: argparse.Namespace) -> dict[str, dict[str, tuple[int, int]]]:
    """Prints and returns the bundles of the kernels of a case, by kernel and chip."""
    known: dict[str, dict[str, tuple[int, int]]] = {}
    print("| kernel | chip | bundles | in a pass | MB of VMEM |\n|---|---|---|---|---|")
    for chip in args.chips:
        with tempfile.TemporaryDirectory() as place:
            vmem = compiled(chip, Path(place), args)
            for name, bundles in sorted(schedules(Path(place)).items()):
                known.setdefault(name, {})[chip] = bundles
                each, ends = bundles
                numbers = f"{each:,} | {ends:,} | {vmem[name] / 1e6:.1f}"
                print(f"| {name} | {chip} | {numbers} |", flush=True)
    return known


def compiled(chip: str, place: Path, args: argparse.Namespace) -> dict[str, int]:
    """Compiles a case for a chip in a new process.

    Args:
      chip: a key of CHIPS.
      place: the directory into which the compiler writes its schedules.
      args: the flags, which select the case and the sizes.

    Returns:
      Bytes of VMEM by kernel.
    """
    flags = f"--xla_jf_dump_to={place} --xla_jf_dump_llo_text=true"
    kept = "case", "window", "block", "head_dim", "vocabulary", "dtype"
    sizes = [f"--{name}={getattr(args, name)}" for name in kept]
    done = subprocess.run(
        [sys.executable, __file__, f"--one={chip}", *sizes], capture_output=True, text=True,
        env=os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{chip}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def schedules(place: Path) -> dict[str, tuple[int, int]]:
    """Returns the bundles of each kernel: those of every step, and those of the first and the last
    step of a pass. If several kernels have the same name, the longest schedule counts.
    """
    found: dict[str, tuple[int, int]] = {}
    for path in place.glob("*_steps*final_bundles.txt"):
        name = NAME.search(path.name)
        if name and "schedule-analysis" not in path.name:
            bundles = count(path.read_text(), has_passes="_passes" in path.name)
            found[name[1]] = max(bundles, found.get(name[1], (0, 0)), key=sum)
    return found


def count(schedule: str, has_passes: bool) -> tuple[int, int]:
    """Returns the bundles of a schedule that every step executes, and the bundles of the regions
    that most steps skip. Without passes, all bundles count as executed by every step.
    """
    bundle, begins, regions = 0, {}, []
    for line in schedule.splitlines():
        if number := BUNDLE.match(line):
            bundle = int(number[1], 16)
        regions += [(begins.pop(end), bundle) for end in END.findall(line) if end in begins]
        begins |= {region: bundle for region in SKIP.findall(line)}
    total, skipped, last = bundle + 1, 0, 0
    for begin, end in sorted(regions):
        # The largest region is the body of the loop over the steps. A region inside of another
        # region is counted with it.
        if has_passes and end - begin < total / 2 and begin >= last:
            skipped, last = skipped + end - begin, end
    return total - skipped, skipped


def compile_one(chip: str, args: argparse.Namespace) -> tuple[str, int]:
    """Compiles a case; returns the text of the compiled module and the bytes of temporaries."""
    import jax
    import kernel_cases
    from jax.sharding import SingleDeviceSharding

    from brt.ops import dispatch
    from brt.planning import topologies

    device = topologies.named(CHIPS[chip]).devices[0]

    def array(*shape: int, dtype: str = args.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    function, arguments = kernel_cases.CASES[args.case](array, args)
    with dispatch.use_backend("tpu", device):
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        compiled = jitted.lower(*arguments).compile()
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints and returns the costs of a case with plain XLA and with kernels, for each chip."""
    from brt.planning.compiled import costs

    print("| case | chip | implementation | Mcycles | GB | temporaries, MiB |")
    print("|---|---|---|---|---|---|")
    found = []
    for chip in args.chips:
        for name in ("xla", "pallas_tpu"):
            args.implementation = name
            text, temporaries = compile_one(chip, args)
            total = costs(text, chip).total
            found.append({
                "chip": chip, "implementation": name, "cycles": total.cycles,
                "bytes": total.bytes, "temporaries": temporaries,
            })  # fmt: skip
            numbers = f"{total.cycles / 1e6:.2f} | {total.bytes / 1e9:.2f} | {temporaries >> 20}"
            print(f"| {args.case} | {chip} | {name} | {numbers} |", flush=True)
    return found


def vmem_of(text: str) -> dict[str, int]:
    """Returns the bytes of VMEM of each kernel in the text of a compiled module."""
    found = {}
    for line in text.splitlines():
        kernel = NAME.search(line)
        used = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', line)
        if kernel and used:
            found[kernel[1]] = int(used[1])
    return found


if __name__ == "__main__":
    main()
