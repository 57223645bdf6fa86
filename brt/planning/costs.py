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
    """Costs of one step on one device.

    Attributes:
      flops: floating-point operations of matrix products.
      bytes: bytes read from and written to the main memory (HBM).
      cycles: cycles that the step takes at least, without waiting for other devices; 0 if unknown.
        They are the compiler's estimates and, for Pallas kernels, the longest of three: the
        schedule, the products at the chip's peak and the bytes at its bandwidth.
      bytes_anywhere: bytes read from and written to any memory, including on-chip memory; copies
        from one memory to another do not count.
    """

    flops: float = 0.0
    bytes: float = 0.0
    cycles: float = 0.0
    bytes_anywhere: float = 0.0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """Returns the sum of this cost and of `times` executions that cost `other` each."""
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


class CollectiveCost(NamedTuple):
    """Costs of one kind of collective operation, such as all-reduce, in a step on one device.

    Attributes:
      times: the number of executions.
      bytes: the bytes of the results of all executions.
    """

    times: int = 0
    bytes: int = 0


class InstructionGroup(NamedTuple):
    """Instructions that differ only in the numbers in their names, such as the same instruction of
    each layer.

    Attributes:
      part: the part of the model.
      operation: the name of the instruction without its numbers.
      result: the HLO type of the result, without its layout.
      source: the path of names in the model under which JAX traced the instructions, with # for
        numbers.
      times: the number of executions of all instructions in a step.
      cost: the total cost of all instructions in the group.
    """

    part: str
    operation: str
    result: str
    source: str
    times: int
    cost: Cost


class Costs(NamedTuple):
    """Costs of one step on one device, by part of the model.

    Attributes:
      parts: the cost of each part of the model.
      collectives: the cost of each kind of collective.
      unknown: names of Pallas kernels whose cycles are unknown.
      instructions: groups of all instructions except collectives, most expensive first.
      overlaps: those of the collectives that run beside other instructions.
      cycles_at_peak: cycles of the kernels whose products or bytes take longer at the chip's peak
        rates than their schedules.
    """

    parts: Mapping[str, Cost]
    collectives: Mapping[str, CollectiveCost]
    unknown: tuple[str, ...] = ()
    instructions: tuple[InstructionGroup, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    cycles_at_peak: float = 0.0

    @property
    def total(self) -> Cost:
        """The sum of the costs of all parts."""
        total = Cost()
        for cost in self.parts.values():
            total = total.plus(cost)
        return total


def costs(text: str, chip: str = "") -> Costs:
    """Returns the costs of a compiled step on a chip.

    Args:
      text: the optimized HLO module of the step, as `jax.stages.Compiled.as_text` returns it.
      chip: the name of the chip in `topologies.CHIPS`. With "", the chip is unknown, and the cycles
        of Pallas kernels are not computed.
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
    """Returns the part of the model, such as "attention", to which an instruction belongs.

    Args:
      source: the path of names under which the instruction was traced, as in `Instruction.source`.
    """
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
