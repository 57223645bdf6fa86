"""Collectives that the compiler starts early, so that they run while the device computes.

In the text of a program, such a collective has a start and a done instruction, and the instructions
between the two run at the same time. TPUs also have fusions that start a collective: their
computation contains the collective, and their names begin with `async-collective-start`.
"""

from typing import NamedTuple

from brt.planning.hlo import Instruction, Module

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip
_FUSED_START, _FUSED_DONE = "async-collective-start", "async-collective-done"


class Overlap(NamedTuple):
    """A collective that runs beside other instructions."""

    kind: str  # such as all-gather
    times: int  # number of executions in a step
    bytes: int  # of the result of one execution
    cycles: float  # of the instructions between the start and the end of one execution


class Overlaps:
    """Finds the overlapping collectives of a program, whose instructions it reads in their order.

    `found` are the collectives that have ended.
    """

    def __init__(self, module: Module):
        self.found: list[Overlap] = []
        self._module = module
        self._work = 0.0  # cycles of all instructions so far; loops count once
        self._running: dict[str, Overlap] = {}

    def started(self, instruction: Instruction, times: int) -> Overlap | None:
        """Returns the collective that the next instruction starts; None if it starts none."""
        if not (collective := self._collective(instruction)):
            return None
        kind = collective.operation.removesuffix("-start")
        started = Overlap(kind, times, result_bytes(collective), self._work)
        self._running[instruction.name] = started
        return started

    def ended(self, instruction: Instruction) -> bool:
        """Returns True if an instruction waits for the end of a collective."""
        if not instruction.name.startswith(_FUSED_DONE) and not (
            instruction.operation.endswith("-done")
            and instruction.operation.removesuffix("-done") in COLLECTIVES
        ):
            return False
        # Fused collectives end in the order in which they start.
        fused = (name for name in self._running if name.startswith(_FUSED_START))
        named = (name for name in instruction.operands if name in self._running)
        if (name := next(named, next(fused, None))) is not None:
            begun = self._running.pop(name)
            self.found.append(begun._replace(cycles=self._work - begun.cycles))
        return True

    def passed(self, cycles: float) -> None:
        """Counts the cycles of an instruction that is no collective."""
        self._work += cycles

    def _collective(self, instruction: Instruction) -> Instruction | None:
        if instruction.operation.removesuffix("-start") in COLLECTIVES:
            return instruction if instruction.operation.endswith("-start") else None
        if not instruction.name.startswith(_FUSED_START):
            return None
        inside = self._module.computations.get(instruction.called("calls") or "", {})
        return next((one for one in inside.values() if one.operation in COLLECTIVES), None)


def result_bytes(instruction: Instruction) -> int:
    """Returns the bytes of an instruction's results."""
    # The type of an asynchronous start lists operands first, then results, then contexts.
    result_shapes, count = instruction.shapes, len(instruction.operands)
    if instruction.operation.endswith("-start") and instruction.operation != "all-reduce-start":
        result_shapes = result_shapes[count : 2 * count]
    return sum(shape.bytes for shape in result_shapes)
