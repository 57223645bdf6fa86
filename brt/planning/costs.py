"""What a compiled step costs, by part of the model: operations, bytes, cycles, collectives.

Counted from the optimized module with loops times their trip counts; the compilers' own
`cost_analysis` counts the body of a loop once.
"""

import collections
import re
from collections.abc import Mapping
from typing import NamedTuple

from brt.planning import products, schedules
from brt.planning.hlo import Instruction, Module
from brt.planning.topologies import CHIPS
from brt.planning.traffic import traffic

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip
# The first scope that is found in an operation's path of names says which part it is.
PARTS = {
    "cross_entropy": "loss",
    "token_scores": "loss",
    "optimizer": "optimizer",
    "recurrent_attention": "recurrence",
    "/cell": "recurrence",
    "finish": "MLP and output",
    "mlp": "MLP and output",
    "window_attention": "attention",
    "memory_attention": "attention",
    "routed_attention": "attention",
    "clustered": "attention",
    "self_attn": "attention",
    "cross_attn": "attention",
    "tokens.attend": "attention",
    "tokens.project": "projections",
    "lookup": "embedding",
    "embed": "embedding",
    "stack": "layer scan",
    "layer": "layer scan",
}
OTHER = "other"
_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id",
    "opt-barrier",
}  # fmt: skip


class Cost(NamedTuple):
    """Of one device and step.

    Attributes:
      flops: of products with matrices.
      bytes: read from and written to the large memory.
      cycles: what the compiler estimates, without waiting for other devices; 0: it does not.
      bytes_anywhere: read and written wherever arrays lie, also beside the processor; what only
        moves from one memory to the other does not count.
    """

    flops: float = 0.0
    bytes: float = 0.0
    cycles: float = 0.0
    bytes_anywhere: float = 0.0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


class Moved(NamedTuple):
    """What one kind of collective does in a step: how often, and the bytes of its results."""

    times: int = 0
    bytes: int = 0


class Alike(NamedTuple):
    """Instructions that differ by nothing but numbers, those of other layers above all.

    Attributes:
      operation: by the compiler's name of it, which says what it consists of.
      result: its type.
      source: the path of names in the model.
      cost: of all of them.
    """

    part: str
    operation: str
    result: str
    source: str
    times: int
    cost: Cost


class Costs(NamedTuple):
    """Of one device and step.

    Attributes:
      unknown: kernels that no cycles are counted for.
      instructions: without collectives, those that take longest first.
    """

    parts: Mapping[str, Cost]
    collectives: Mapping[str, Moved]
    unknown: tuple[str, ...] = ()
    instructions: tuple[Alike, ...] = ()

    @property
    def total(self) -> Cost:
        total = Cost()
        for cost in self.parts.values():
            total = total.plus(cost)
        return total


def costs(text: str, chip: str = "") -> Costs:
    """Of an optimized module, as `compiled.as_text()` gives it, for a chip."""
    module = Module(text)
    parts: dict[str, Cost] = collections.defaultdict(Cost)
    moved: dict[str, Moved] = collections.defaultdict(Moved)
    alike: dict[tuple[str, ...], Alike] = {}
    unknown = set()
    for computation, one, times in module.run():
        kind = one.operation.removesuffix("-start")
        if kind in COLLECTIVES:
            before = moved[kind]
            moved[kind] = Moved(before.times + times, before.bytes + times * _result(one))
            continue
        cost = _cost(module, computation, one, chip)
        if any(cost):
            source = one.source or _neighbour(module, computation, one)
            part = part_of(source)
            parts[part] = parts[part].plus(cost, times)
            key = part, *_alike(one, source)
            same = alike.get(key, Alike(*key, 0, Cost()))
            alike[key] = same._replace(times=same.times + times, cost=same.cost.plus(cost, times))
            if not cost.cycles:
                unknown |= schedules.kernels(one.attributes)
    listed = sorted(alike.values(), key=lambda x: (-x.cost.cycles, -x.cost.bytes_anywhere))
    return Costs(dict(parts), dict(moved), tuple(sorted(unknown)), tuple(listed))


def _alike(one: Instruction, source: str) -> tuple[str, str, str]:
    """Operation, result and source, without what tells one layer's from another's."""
    name = re.sub(r"(\.\d+)+$", "", one.name)
    result = re.sub(r"\{[^{}]*\}", "", one.type)
    return name, result, re.sub(r"\d+", "#", source.split(";")[0])


def part_of(source: str) -> str:
    """The part of the model that a path of names belongs to."""
    return next((part for scope, part in PARTS.items() if scope in source), OTHER)


def _result(one: Instruction) -> int:
    """Bytes; what is started has its operands in front of its results, and contexts behind them."""
    found, count = one.shapes, len(one.operands)
    if one.operation.endswith("-start") and one.operation != "all-reduce-start":
        found = found[count : 2 * count]
    return sum(shape.bytes for shape in found)


def _neighbour(module: Module, computation: str, one: Instruction) -> str:
    """What the compiler made has the name of what it reads, or of what reads it."""
    inside = module.computations[computation]
    for operand in one.operands:
        if operand in inside and inside[operand].source:
            return inside[operand].source
    users = (other for other in inside.values() if one.name in other.operands)
    return next((user.source for user in users if user.source), "")


def _cost(module: Module, computation: str, one: Instruction, chip: str = "") -> Cost:
    done = one.operation.endswith("-done")  # counted where it starts
    if done or one.operation in _FREE or "AllocateBuffer" in one.attributes:
        return Cost()
    flops = products.flops(module, computation, one)
    large, anywhere = (traffic(module, computation, one, places) for places in (False, True))
    cycles = float(one.cycles)
    if not cycles and (scheduled := schedules.cycles(one.attributes, chip)):
        cycles = max(scheduled, *_least(flops, large, chip))
    return Cost(flops, large, cycles, anywhere)


def _least(flops: float, moved: int, chip: str) -> tuple[float, float]:
    """Cycles that products and bytes take at a chip's peaks; schedules wait for neither."""
    known = CHIPS[chip]
    return flops / known.flops * known.clock, moved / known.bandwidth * known.clock
