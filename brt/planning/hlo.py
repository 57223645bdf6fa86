"""Reads an optimized module as XLA prints it: its instructions, and how often each runs."""

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
    """An array in a type.

    Attributes:
      bytes: of its elements, packed.
      on_chip: it lies in a memory beside the processor, not in the large one.
    """

    dtype: str
    dimensions: tuple[int, ...]
    bytes: int
    on_chip: bool


class Instruction(NamedTuple):
    """A line: `%name = type operation(operands), attributes`.

    Attributes:
      body: what stands in the parentheses, as text.
    """

    name: str
    type: str
    operation: str
    operands: tuple[str, ...]
    body: str
    attributes: str
    is_root: bool

    @property
    def shapes(self) -> list[Shape]:
        return shapes(self.type)

    @property
    def source(self) -> str:
        """The path of names that it was traced under; "" of what the compiler made."""
        found = _NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def cycles(self) -> int:
        """What the compiler thinks that it takes; 0 where it does not say."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else 0

    def called(self, key: str) -> str | None:
        """The computation that an attribute names."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


@functools.lru_cache(maxsize=1 << 16)
def shapes(text: str) -> list[Shape]:
    """All arrays of a type."""
    found = []
    for dtype, dimensions, layout in _ARRAY.findall(text):
        sizes = tuple(int(d) for d in dimensions.split(",") if d)
        on_chip = bool(re.search(r"S\([1-9]", layout))
        found.append(Shape(dtype, sizes, math.prod(sizes) * _SIZES[dtype], on_chip))
    return found


def size(text: str) -> int:
    """Bytes of all arrays of a type."""
    return sum(shape.bytes for shape in shapes(text))


class Module:
    """The computations of a module, by name; `entry` is the one that runs."""

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
            elif found := _INSTRUCTION.match(line):
                instruction = _parsed(found[2], found[3], bool(found[1]))
                current[instruction.name] = instruction

    def trip_count(self, loop: Instruction) -> int:
        """How often a loop's body runs; 1 where its condition does not say."""
        stated = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if stated:
            return int(stated[1])
        condition = self.computations.get(loop.called("condition") or "", {})
        for instruction in condition.values():
            if instruction.operation == "constant" and instruction.type.startswith("s32[]"):
                return int(instruction.body)
        return 1

    def run(self, computation: str = "", times: int = 1) -> Iterator[tuple[str, Instruction, int]]:
        """Every instruction that runs by itself, its computation, and how often it does so."""
        computation = computation or self.entry
        for one in self.computations[computation].values():
            if one.operation == "while":
                body = one.called("body") or ""
                yield from self.run(body, times * self.trip_count(one))
            elif one.operation == "conditional":
                for branch in re.findall(r"(?:branch_computations=\{|_computation=)%?([\w.\-]+)",
                                         one.attributes):  # fmt: skip
                    yield from self.run(branch, times)
            elif one.operation == "call":
                yield from self.run(one.called("to_apply") or "", times)
            else:
                yield computation, one, times


def _lines(text: str) -> Iterator[str]:
    """One for each instruction: attributes of kernels within fusions go over several."""
    held = ""
    for line in text.splitlines():
        if line.startswith(('"', "}")) and not _END.match(line):
            held += line
            continue
        yield held
        held = line
    yield held


def _parsed(name: str, rest: str, is_root: bool) -> Instruction:
    """Of what stands behind the equals sign."""
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    operation = rest[: rest.index("(")]
    rest = rest[len(operation) :]
    end = _closing(rest)
    body, attributes = rest[1:end], rest[end + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", body))
    return Instruction(name, kind, operation, operands, body, attributes, is_root)


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with closes."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    raise ValueError(f"not an instruction: {text[:80]}")
