"""Parser of optimized HLO modules, the text form of programs that XLA has compiled.

A module consists of computations, which are lists of instructions. An instruction may call another
computation, such as the body of a loop. The parser also determines how often each instruction runs.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_SIZES = {
    "f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2,
    "u16": 2, "pred": 1, "s8": 1, "u8": 1, "s4": 1, "u4": 1, "u2": 1, "s2": 1,
    "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
_ARRAY = re.compile(rf"\b({'|'.join(_SIZES)})\[([\d,]*)\](\{{[^{{}}]*\}})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_NAME = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Shape(NamedTuple):
    """An array in an HLO type."""

    dtype: str  # XLA's name of the dtype
    dimensions: tuple[int, ...]
    bytes: int  # without padding
    on_chip: bool  # True if the array is in on-chip memory instead of the main memory (HBM)


class Instruction(NamedTuple):
    """A line of HLO: `%name = type operation(body), attributes`; the body names the operands."""

    name: str
    type: str
    operation: str
    operands: tuple[str, ...]
    body: str
    attributes: str
    is_root: bool  # True if the result is the result of the computation

    @property
    def shapes(self) -> list[Shape]:
        return shapes(self.type)

    @property
    def source(self) -> str:
        """The path of names under which JAX traced the instruction; "" if XLA inserted it."""
        match = _NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def cycles(self) -> int:
        """Cycles that the compiler estimates; 0 if it gives no estimate."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match else 0

    def called(self, key: str) -> str | None:
        """Returns the name of the computation that an attribute such as "body" names, or None."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None


@functools.lru_cache(maxsize=1 << 16)
def shapes(text: str) -> list[Shape]:
    """Returns all arrays of an HLO type, such as "f32[8,128]{1,0}"; a tuple has several."""
    arrays = []
    for dtype, dimensions, layout in _ARRAY.findall(text):
        sizes = tuple(int(d) for d in dimensions.split(",") if d)
        on_chip = bool(re.search(r"S\([1-9]", layout))
        arrays.append(Shape(dtype, sizes, math.prod(sizes) * _SIZES[dtype], on_chip))
    return arrays


def size(text: str) -> int:
    """Returns the total number of bytes of all arrays of an HLO type."""
    return sum(shape.bytes for shape in shapes(text))


class Module:
    """A parsed HLO module, from the text that `jax.stages.Compiled.as_text` returns.

    `computations` has the instructions of each computation, both by name; `entry` is the name of
    the computation that runs first.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] | None = None
        for line in _lines(text):
            if current is None:
                if head := _HEAD.match(line):
                    current = self.computations.setdefault(head[2], {})
                    self.entry = head[2] if head[1] else self.entry
            elif _END.match(line):
                current = None
            elif match := _INSTRUCTION.match(line):
                instruction = _parse(match[2], match[3], bool(match[1]))
                current[instruction.name] = instruction

    def trip_count(self, loop: Instruction) -> int:
        """Returns the number of iterations of a `while` instruction; 1 if it is not stated."""
        stated = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if stated:
            return int(stated[1])
        condition = self.computations.get(loop.called("condition") or "", {})
        for instruction in condition.values():
            # Loops over the shares of a sharded matrix, which XLA itself writes, count in u32.
            integer = re.match(r"[su](32|64)\[\]", instruction.type)
            if instruction.operation == "constant" and integer:
                return int(instruction.body)
        return 1

    def executed_instructions(
        self, computation: str = "", times: int = 1
    ) -> Iterator[tuple[str, Instruction, int]]:
        """Yields (name of its computation, instruction, number of executions) for each instruction.

        These are the instructions that `computation` ("": the entry) executes, when it runs `times`
        times, with those in its loops, branches and calls. Instructions within a fusion are left
        out, because the fusion runs as one instruction.
        """
        computation = computation or self.entry
        for instruction in self.computations[computation].values():
            if instruction.operation == "while":
                body = instruction.called("body") or ""
                yield from self.executed_instructions(body, times * self.trip_count(instruction))
            elif instruction.operation == "conditional":
                for branch in re.findall(r"(?:branch_computations=\{|_computation=)%?([\w.\-]+)",
                                         instruction.attributes):  # fmt: skip
                    yield from self.executed_instructions(branch, times)
            elif instruction.operation == "call":
                yield from self.executed_instructions(instruction.called("to_apply") or "", times)
            else:
                yield computation, instruction, times


def _lines(text: str) -> Iterator[str]:
    """Yields a line per instruction; joins attributes of kernels that span several lines."""
    pending = ""
    for line in text.splitlines():
        if line.startswith(('"', "}")) and not _END.match(line):
            pending += line
            continue
        yield pending
        pending = line
    yield pending


def _parse(name: str, rest: str, is_root: bool) -> Instruction:
    """Parses the part of a line after the equals sign."""
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    operation = rest[: rest.index("(")]
    rest = rest[len(operation) :]
    end = _closing(rest)
    body, attributes = rest[1:end], rest[end + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", body))
    return Instruction(name, kind, operation, operands, body, attributes, is_root)


def _closing(text: str) -> int:
    """Returns the position at which the parenthesis at the beginning of `text` closes."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    raise ValueError(f"not an instruction: {text[:80]}")
