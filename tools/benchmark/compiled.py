"""Prints the costs of a train step for each part of the model, as compilers for other machines
estimate them.

    python tools/benchmark/compiled.py --topology=v5e:1x1 --gin_file=FILE.gin [--gin_bindings=...]
        [--implementations=window_attention:xla,pallas_tpu | --lengths=4096,8192]
    python tools/benchmark/compiled.py --baseline=tools/benchmark/baselines/rec.json [--record]

The costs are cycles and bytes of one step on one device. The costs of a loop's body are multiplied
by the trip count. The cycles of a kernel are the length of its schedule, or the cycles of its
products and bytes at the chip's peak rates if these are more (see `brt/planning`). The kernels of
GPUs are taken to reach 76 % and 90 % of these rates, and to start within 2 us. Schedules lack
stalls, so all of this is a lower bound on the time. The time of the step is that of the cycles and
of the collectives that no computation covers, and its share of the chip's peak counts the FLOPs of
the model without recomputation.
The table also has the bound of each part, which is the larger of two numbers of cycles:
those that its matrix products take at the chip's peak, and those that its traffic takes at the peak
of the memory. "Reached" is the share of the bound in the part's cycles.
The step is compiled but not run. With --implementations, the table compares implementations of one
or several operations, with ratios to the first one. With --lengths, the table has the costs per
token for several lengths of the segment. With --instructions=20, the 20 instructions that take
longest are listed; those that are no matrix products are candidates for optimization.

A baseline is a file with a case (.gin files, bindings, machine), the versions of the compiler and
the costs. With --baseline, the case is compiled again, and the exit code is 1 if the costs of a
part have grown by more than 5 %. With --record, the new costs replace those in the file, and the
tables are printed. If the file does not exist, it is created for the case of the flags. With
--arithmetic, only what follows from the case without compiling it is recorded: the tokens and the
FLOPs of the model. The
baselines of whole models are in tools/benchmark/baselines/full/; each takes minutes to compile. The
bytes of baselines without a date are older: they count all of an array of which rows are gathered.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from conditions import report

from brt import command_line, runtime
from brt.errors import ConfigError
from brt.planning.topologies import CHIPS, Chip
from brt.training import workdir

GROWTH = 1.05  # The costs of a part may grow by this factor.
LEAST = 0.001  # In addition, a part may grow by this share of the costs of the whole step.
_SHOWN = 80  # Maximum number of characters shown of a type or a path.
KEPT = (
    "tokens_per_step", "model_flops", "temporary_bytes", "peak_bytes", "cycles_at_peak",
    "collectives", "covered_network_seconds", "step_seconds", "mfu",
)  # fmt: skip
UNITS = {"cycles": ("Mcycles", 1e6), "bytes": ("GB", 1e9)}
Figures = Mapping[str, Any]


class Case(NamedTuple):
    """A config to compile, and the machine to compile for."""

    gin_file: list[str]
    gin_bindings: list[str]
    topology: str

    def figures(self, *more: str) -> Figures:
        """Compiles the case with additional bindings and returns the figures of `brt.plan`.

        Raises:
          ConfigError: a setting or the machine is unknown, or the compiler refuses the program.
        """
        from brt.planning import plan, topologies

        config = command_line.read(self.gin_file, [*self.gin_bindings, *more]).config
        found = plan.plan_json(plan.plan(config, topologies.named(self.topology)))
        shown = ", ".join(more) or self.topology
        print(f"{shown}: compiled in {found['compile_seconds']:.0f} s", file=sys.stderr)
        return found

    def sizes(self) -> dict[str, Any]:
        """Returns the tokens of a step, and the FLOPs that the model needs for them."""
        from brt.ops import dispatch
        from brt.planning import plan, topologies

        config = command_line.read(self.gin_file, self.gin_bindings).config
        machine = topologies.named(self.topology)
        with dispatch.use_backend(machine.backend, machine.devices[0]):
            *_, tokens, flops = plan.shaped(config, machine)
        return {"tokens_per_step": tokens, "model_flops": flops}


def main(args: argparse.Namespace) -> int:
    runtime.use_cpus()  # Nothing runs here, so other processes can use the accelerators.
    if args.baseline:
        return beside_baseline(args)
    if not args.topology:
        raise ConfigError("--topology or --baseline says which machine to compile for")
    case = Case(args.gin_file, args.gin_bindings, args.topology)
    if args.lengths:
        found = {n: case.figures(f"Training.segment_length = {n}") for n in args.lengths}
        lines = by_length(found)
    else:
        found = {name: case.figures(*more) for name, more in variants(args.implementations)}
        lines = tables(found)
    if args.instructions:
        lines += [line for one in found.values() for line in longest(one, args.instructions)]
    print("\n".join(lines))
    model = command_line.read(args.gin_file, args.gin_bindings).config.model
    named = {str(name): one for name, one in found.items()}
    report(args, named, {"model": model}, f"none, compiled for {args.topology}")
    return 0


def tables(found: Mapping[str, Figures]) -> list[str]:
    """Returns the tables of the costs of each part and of their bounds, by name of a variant."""
    steps = [f"{name}: {sentence}" for name, one in found.items() if (sentence := step(one))]
    return side_by_side(found) + steps + [line for one in found.values() for line in bounds(one)]


def step(found: Figures) -> str:
    """Returns a sentence with the least time of a step and what it consists of."""
    seconds = found["step_seconds"]
    if "compiler" not in seconds:
        return ""
    chip = _chip(found)
    assert chip is not None
    computing, covered = found["cycles"] / chip.clock, found["covered_network_seconds"]
    return (
        f"at least {1e3 * seconds['compiler']:.1f} ms a step, {found['mfu']['compiler']:.1%} of "
        f"the peak by the model's FLOPs: {1e3 * computing:.1f} ms of computation, of which kernels "
        f"at the chip's peak rates take {found['cycles_at_peak'] / found['cycles']:.0%}, and "
        f"{1e3 * seconds['network']:.1f} ms of collectives, of which {1e3 * covered:.1f} ms are "
        "covered"
    )


def variants(text: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each implementation and the bindings that select it.

    Args:
      text: operations and implementations as "operation,...:name,..."; None for the default.
    """
    if not text:
        yield "auto", []
        return
    operations, colon, names = text.partition(":")
    if not (colon and names):
        raise ConfigError(
            f"--implementations={text} must be operations and names of what computes them, as "
            "in --implementations=window_attention:xla,pallas_tpu"
        )
    for name in names.split(","):
        yield name, [f"Kernels.use = {tuple(f'{one}={name}' for one in operations.split(','))}"]


def parts_of(found: Figures) -> dict[str, Mapping[str, float]]:
    """Returns cycles and bytes of each part, the largest part first, and of the whole step."""
    parts = sorted(found["parts"].items(), key=lambda one: (-one[1]["cycles"], -one[1]["bytes"]))
    total = {"cycles": found["cycles"], "bytes": found["memory_bytes"], "flops": found["flops"]}
    return dict(parts) | {"all": total}


def bound(cost: Mapping[str, float], chip: Chip) -> float:
    """Returns the cycles that a part's products and its traffic take at least."""
    return chip.clock * max(cost["flops"] / chip.flops, cost["bytes"] / chip.bandwidth)


def bounds(found: Figures) -> list[str]:
    """Returns the lines of a table of the parts with their bounds."""
    chip = _chip(found)
    if chip is None or not found["cycles"]:
        return []
    heads = ("part", "TFLOP of products", "GB", "Mcycles", "bound, Mcycles", "reached")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for part, cost in parts_of(found).items():
        least = bound(cost, chip)
        numbers = cost["flops"] / 1e12, cost["bytes"] / 1e9, cost["cycles"] / 1e6, least / 1e6
        share = f"{least / cost['cycles']:.0%}" if cost["cycles"] else "-"
        lines.append(f"| {part} | {' | '.join(f'{x:.2f}' for x in numbers)} | {share} |")
    return ["", *lines]


def _chip(found: Figures) -> Chip | None:
    return next((chip for name, chip in CHIPS.items() if name in found["topology"]), None)


def side_by_side(found: Mapping[str, Figures]) -> list[str]:
    """Returns the lines of a table of the parts, with ratios to the first column.

    The cycles of GPUs are those of `brt.planning.compiled`, because compilers estimate none.
    """
    first, *others = found
    by_part = {name: parts_of(one) for name, one in found.items()}
    columns = [column for column in UNITS if by_part[first]["all"][column]]
    heads = [f"{name}: {UNITS[column][0]}" for name in found for column in columns]
    heads += [f"{column}, {name} / {first}" for name in others for column in columns]
    lines = [f"| part | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    parts = dict.fromkeys(part for one in by_part.values() for part in [*one][:-1])
    for part in [*parts, "all"]:
        costs = {name: by_part[name].get(part, {"cycles": 0.0, "bytes": 0.0}) for name in found}
        cells = [
            f"{cost[column] / UNITS[column][1]:.2f}"
            for cost in costs.values()
            for column in columns
        ]
        for name in others:
            for column in columns:
                before = costs[first][column]
                cells.append(f"{costs[name][column] / before:.2f}" if before else "-")
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return [*lines, "", *(memory(name, one) for name, one in found.items())]


def memory(name: str, found: Figures) -> str:
    """Returns a sentence with the temporary and the peak memory of a step."""
    temporaries, peak = (found[f"{what}_bytes"] / 2**30 for what in ("temporary", "peak"))
    return f"{name}: {temporaries:.2f} GiB of temporaries, peak {peak:.2f} GiB"


def longest(found: Figures, count: int) -> list[str]:
    """Returns a table of the longest instructions; equal instructions of layers share a row."""
    heads = ("Mcycles", "GB", "TFLOP of products", "times", "part", "operation", "result", "source")
    lines = ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in found["instructions"][:count]:
        numbers = one["cycles"] / 1e6, one["bytes"] / 1e9, one["flops"] / 1e12
        cells = [f"{x:.3f}" for x in numbers] + [str(one["times"]), one["part"], one["operation"]]
        cells += [one["result"][:_SHOWN], one["source"][-_SHOWN:]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def by_length(found: Mapping[int, Figures]) -> list[str]:
    """Returns a table of the costs per token for each length of the segment.

    The optimizer is left out, because its costs do not depend on the number of tokens.
    """
    heads = ("tokens", "cycles a token", "KB a token", "of all memories", "temporaries, KB a token")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    costs: dict[str, list[float]] = {"cycles": [], "bytes": [], "bytes_anywhere": []}
    for tokens, one in found.items():
        parts = [part for name, part in one["parts"].items() if name != "optimizer"]
        for column, of_tokens in costs.items():
            of_tokens.append(sum(part[column] for part in parts) / tokens)
        cycles, *sizes = (of_tokens[-1] for of_tokens in costs.values())
        sizes_shown = [f"{x / 1e3:.1f}" for x in (*sizes, one["temporary_bytes"] / tokens)]
        lines.append(f"| {tokens:,} | {cycles:,.0f} | {' | '.join(sizes_shown)} |")
    more, large, anywhere = (max(x) / min(x) - 1 for x in costs.values())
    spread = f"cycles +{more:.1%}, bytes +{large:.1%}, of all memories +{anywhere:.1%}"
    return [*lines, "", f"Largest over smallest: {spread}"]


def beside_baseline(args: argparse.Namespace) -> int:
    """Compiles the case of a baseline; returns the exit code, which is 1 if a part costs more."""
    path = Path(args.baseline)
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if args.topology:
        case = Case(args.gin_file, args.gin_bindings, args.topology)
    elif recorded:
        case = Case(**recorded["case"])
    else:
        raise ConfigError(f"--baseline={path} does not exist; --topology and --record begin it")
    if args.arithmetic:
        path.write_text(json.dumps(recorded | case.sizes(), indent=1) + "\n")
        return 0
    versions = {name: version(name) for name in ("jax", "libtpu")}
    if args.record:
        figures = case.figures()
        date = workdir.current_time()[:10]
        content = {"case": case._asdict(), "date": date, "versions": versions, **kept(figures)}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print("\n".join(tables({path.stem: figures})))
        return 0
    if versions != recorded["versions"]:
        raise ConfigError(
            f"{path} is of {shown(recorded['versions'])}, and here are {shown(versions)}, whose "
            "figures are others; --record takes them down"
        )
    now = kept(case.figures())
    found = list(grown(now, recorded))
    for sentence in found:
        print(f"{path.stem}: {sentence}")
    if found:
        print(f"If so be it: python tools/benchmark/compiled.py --baseline={path} --record")
    else:
        print(f"{path.stem}: no part costs more than 5 % more than it did")
    return int(bool(found))


def shown(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def kept(found: Figures) -> dict[str, Any]:
    """Returns the part of the figures that is stored in a baseline."""
    parts = {
        part: {column: round(cost[column]) for column in (*UNITS, "flops")}
        for part, cost in parts_of(found).items()
    }
    return {name: found[name] for name in KEPT} | {"parts": parts}


def grown(now: Figures, then: Figures) -> Iterator[str]:
    """Yields a sentence for each part whose costs have grown too much (see GROWTH and LEAST)."""
    for column, (unit, scale) in UNITS.items():
        for part, cost in now["parts"].items():
            before = then["parts"].get(part, {}).get(column, 0)
            if cost[column] > GROWTH * before + LEAST * then["parts"]["all"][column]:
                yield f"{part} takes {cost[column] / scale:.2f} {unit}, not {before / scale:.2f}"
    temporaries, before = now["temporary_bytes"], then["temporary_bytes"]
    if temporaries > GROWTH * before:
        yield f"temporaries take {temporaries / 2**30:.2f} GiB, not {before / 2**30:.2f}"


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    repeated: dict[str, Any] = {"action": "append", "default": []}
    flags.add_argument("--topology", metavar="NAME", help="as brt.plan takes it: v5e:1x1, h100x1")
    flags.add_argument("--gin_file", metavar="FILE", help="repeatable", **repeated)
    flags.add_argument("--gin_bindings", metavar="'Section.field = value'", **repeated)
    flags.add_argument("--implementations", metavar="OPERATION,...:NAME,...")
    flags.add_argument(
        "--lengths", metavar="TOKENS,TOKENS", help="of segments, one step each",
        type=lambda text: [int(n) for n in text.split(",")],
    )  # fmt: skip
    flags.add_argument("--instructions", metavar="N", type=int, default=0, help="lists so many")
    flags.add_argument("--baseline", metavar="FILE")
    flags.add_argument("--record", action="store_true", help="write the baseline")
    flags.add_argument("--arithmetic", action="store_true", help="only what needs no compiler")
    command_line.add_json_flag(flags)
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
