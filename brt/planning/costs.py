"""Costs of a compiled step by part of the model: operations, bytes, cycles, collectives.

The costs are computed from the optimized HLO module, the text form of the compiled program. The
body of a loop counts as often as the loop runs. The `cost_analysis` of the compilers counts the
body only once.
"""

import collections
import re
from collections.abc import Mapping
from typing import NamedTuple

from brt.planning import products, schedules
from brt.planning.hlo import Instruction, Module
from brt.planning.overlap import COLLECTIVES, Overlap, Overlaps, result_bytes
from brt.planning.topologies import CHIPS
from brt.planning.traffic import traffic

# The table maps scopes (names in the traced program) to parts of the model. An operation belongs to
# the part of the first scope in the table that occurs in the operation's path of names.
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
    """Costs of one step on one device."""

    flops: float = 0.0  # floating-point operations of matrix products
    bytes: float = 0.0  # bytes read from and written to the main memory (HBM)
    # The least cycles of the step, without waiting for other devices; 0 if unknown. They are the
    # compiler's estimates and, for Pallas kernels, the longest of three: the schedule, the products
    # at the chip's peak and the bytes at its bandwidth.
    cycles: float = 0.0
    # Bytes read from and written to any memory, including on-chip memory; copies from one memory to
    # another do not count.
    bytes_anywhere: float = 0.0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


class CollectiveCost(NamedTuple):
    """Costs of one kind of collective operation, such as all-reduce, in a step on one device."""

    times: int = 0  # number of executions
    bytes: int = 0  # of the results of all executions


class InstructionGroup(NamedTuple):
    """Instructions that differ only in the numbers in their names, such as one of each layer."""

    part: str  # the part of the model
    operation: str  # the name of the instruction without its numbers
    result: str  # the HLO type of the result, without its layout
    source: str  # the path of names under which JAX traced the instructions, with # for numbers
    times: int  # the number of executions of all instructions in a step
    cost: Cost  # the total of all instructions


class Costs(NamedTuple):
    """Costs of one step on one device, by part of the model."""

    parts: Mapping[str, Cost]
    collectives: Mapping[str, CollectiveCost]  # by kind
    unknown: tuple[str, ...] = ()  # names of Pallas kernels whose cycles are unknown
    instructions: tuple[InstructionGroup, ...] = ()  # most expensive first, without collectives
    overlaps: tuple[Overlap, ...] = ()  # collectives that run beside other instructions
    # Cycles of the kernels whose products or bytes take longer at the chip's peak rates than their
    # schedules.
    cycles_at_peak: float = 0.0

    @property
    def total(self) -> Cost:
        total = Cost()
        for cost in self.parts.values():
            total = total.plus(cost)
        return total


def costs(text: str, chip: str = "") -> Costs:
    """Returns the costs of a compiled step on a chip of `topologies.CHIPS`.

    `text` is the optimized HLO module of the step, as `jax.stages.Compiled.as_text` returns it. If
    the chip is "", the cycles of Pallas kernels are not computed.
    """
    module = Module(text)
    parts: dict[str, Cost] = collections.defaultdict(Cost)
    collectives: dict[str, CollectiveCost] = collections.defaultdict(CollectiveCost)
    groups: dict[tuple[str, ...], InstructionGroup] = {}
    unknown, overlaps, at_peak = set(), Overlaps(module), 0.0
    for computation, instruction, times in module.executed_instructions():
        started = overlaps.started(instruction, times)
        if overlaps.ended(instruction):
            continue
        if started or instruction.operation in COLLECTIVES:
            kind = started.kind if started else instruction.operation
            before = collectives[kind]
            size = started.bytes if started else result_bytes(instruction)
            collectives[kind] = CollectiveCost(before.times + times, before.bytes + times * size)
            continue
        cost = _cost(module, computation, instruction, chip)
        overlaps.passed(cost.cycles)
        if any(cost):
            source = instruction.source or _neighbour(module, computation, instruction)
            part = part_of(source)
            parts[part] = parts[part].plus(cost, times)
            key = part, *_group_key(instruction, source)
            group = groups.get(key, InstructionGroup(*key, 0, Cost()))
            groups[key] = group._replace(
                times=group.times + times, cost=group.cost.plus(cost, times)
            )
            if not cost.cycles:
                unknown |= schedules.kernels(instruction.attributes)
            elif 0 < schedules.cycles(instruction.attributes, chip) < cost.cycles:
                at_peak += times * cost.cycles
    ordered = sorted(groups.values(), key=lambda x: (-x.cost.cycles, -x.cost.bytes_anywhere))
    return Costs(
        dict(parts), dict(collectives), tuple(sorted(unknown)), tuple(ordered),
        tuple(overlaps.found), at_peak,
    )  # fmt: skip


def _group_key(instruction: Instruction, source: str) -> tuple[str, str, str]:
    """Returns operation, result and source without the numbers that distinguish layers."""
    name = re.sub(r"(\.\d+)+$", "", instruction.name)
    result = re.sub(r"\{[^{}]*\}", "", instruction.type)
    return name, result, re.sub(r"\d+", "#", source.split(";")[0])


def part_of(source: str) -> str:
    """Returns the part of the model, such as "attention", of an instruction with this `source`."""
    return next((part for scope, part in PARTS.items() if scope in source), OTHER)


def _neighbour(module: Module, computation: str, instruction: Instruction) -> str:
    """Returns the path of names of an operand or user, for an instruction without a path."""
    inside = module.computations[computation]
    for operand in instruction.operands:
        if operand in inside and inside[operand].source:
            return inside[operand].source
    users = (other for other in inside.values() if instruction.name in other.operands)
    return next((user.source for user in users if user.source), "")


def _cost(module: Module, computation: str, instruction: Instruction, chip: str = "") -> Cost:
    # The cost of an asynchronous operation is counted at its start instruction.
    done = instruction.operation.endswith("-done")
    if done or instruction.operation in _FREE or "AllocateBuffer" in instruction.attributes:
        return Cost()
    flops = products.flops(module, computation, instruction)
    large, anywhere = (traffic(module, computation, instruction, flag) for flag in (False, True))
    # A kernel may read an array several times.
    again = max(0, schedules.bytes_accessed(instruction.attributes) - anywhere)
    large, anywhere = large + again, anywhere + again
    cycles = float(instruction.cycles)
    if not cycles and (scheduled := schedules.cycles(instruction.attributes, chip)):
        cycles = max(scheduled, *_least(flops, large, chip))
    return Cost(flops, large, cycles, anywhere)


def _least(flops: float, size: int, chip: str) -> tuple[float, float]:
    """Returns the minimum cycles for products and for memory traffic at the chip's peak rates.

    The compiler's schedule of a kernel does not include waiting for memory, so the kernel takes at
    least these cycles.
    """
    known = CHIPS[chip]
    return flops / known.flops * known.clock, size / known.bandwidth * known.clock
