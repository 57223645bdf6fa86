"""What a compiled step costs, by part of the model: operations, bytes, cycles, collectives.

Counted from the optimized module with loops times their trip counts; the compilers' own
`cost_analysis` counts the body of a loop once.
"""

import collections
from collections.abc import Mapping
from typing import NamedTuple

from brt.planning import products, schedules
from brt.planning.hlo import Instruction, Module, Shape, shapes, size

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
_SLICES = "slice", "dynamic-slice"
_STARTS = {"copy-start": 0, "slice-start": 1}  # where the result is, beside the operand


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


class Costs(NamedTuple):
    """Of one device and step.

    Attributes:
      unknown: kernels that no cycles are counted for.
    """

    parts: Mapping[str, Cost]
    collectives: Mapping[str, Moved]
    unknown: tuple[str, ...] = ()

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
    unknown = set()
    for computation, one, times in module.run():
        kind = one.operation.removesuffix("-start")
        if kind in COLLECTIVES:
            before = moved[kind]
            moved[kind] = Moved(before.times + times, before.bytes + times * _result(one))
            continue
        cost = _cost(module, computation, one, chip)
        if any(cost):
            part = part_of(one.source or _neighbour(module, computation, one))
            parts[part] = parts[part].plus(cost, times)
            if not cost.cycles:
                unknown |= schedules.kernels(one.attributes)
    return Costs(dict(parts), dict(moved), tuple(sorted(unknown)))


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
    cycles = one.cycles or schedules.cycles(one.attributes, chip)
    large, anywhere = (_traffic(module, computation, one, places) for places in (False, True))
    return Cost(flops, large, cycles, anywhere)


def _traffic(module: Module, computation: str, one: Instruction, anywhere: bool) -> int:
    """Bytes read and written, of the large memory or `anywhere`."""
    inside = module.computations[computation]
    sources = [shapes(inside[o].type) if o in inside else [] for o in one.operands]
    if anywhere and (one.operation in _STARTS or _changes_place(one, sources)):
        return 0
    read = [
        0 if not anywhere and all(x.on_chip for x in source) else sum(x.bytes for x in source)
        for source in sources
    ]
    written = [0 if shape.on_chip and not anywhere else shape.bytes for shape in one.shapes]
    if one.operation == "fusion":
        called = one.called("calls") or ""
        for i, part in _slices(module, called).items():
            read[i] = min(read[i], part)
        for i, update in enumerate(_updates(module, called)):
            written[i] = written[i] if update is None else min(written[i], update)
    elif one.operation in _STARTS:
        result = one.shapes[_STARTS[one.operation]]
        read, written = [min(read[0], result.bytes)], [0 if result.on_chip else result.bytes]
    elif one.operation in _SLICES:
        read = [min(read[0], size(one.type))]
    elif one.operation == "dynamic-update-slice":
        update = size(inside[one.operands[1]].type)
        read, written = [read[1]], [min(written[0], update)]
    return sum(read) + sum(written)


def _changes_place(one: Instruction, sources: list[list[Shape]]) -> bool:
    """Whether it copies from one memory to the other."""
    places = {shape.on_chip for shape in (*one.shapes, *(x for found in sources for x in found))}
    return one.operation == "copy" and len(places) == 2


def _slices(module: Module, called: str) -> dict[int, int]:
    """Bytes that a fusion reads of parameters of which it reads slices only."""
    inside = module.computations[called].values()
    found = {
        int(one.body): _sliced(module, called, one.name)
        for one in inside
        if one.operation == "parameter"
    }
    return {place: part for place, part in found.items() if part is not None}


def _sliced(module: Module, computation: str, name: str) -> int | None:
    """Bytes of the slices that are read of an array; None: it is read whole."""
    users = [one for one in module.computations[computation].values() if name in one.operands]
    parts: list[int | None] = [None] if not users else []
    for user in users:
        if user.operation == "bitcast":
            parts.append(_sliced(module, computation, user.name))
        elif user.operation == "fusion":
            inner = _slices(module, user.called("calls") or "")
            parts += [inner.get(i) for i, operand in enumerate(user.operands) if operand == name]
        elif user.operation in _SLICES and user.operands[0] == name:
            parts.append(size(user.type))
        else:
            in_place = user.operation == "dynamic-update-slice" and user.operands[0] == name
            parts.append(0 if in_place else None)
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _updates(module: Module, called: str) -> list[int | None]:
    """Bytes that a fusion writes of results that are updated in place; None: all of them."""
    inside = module.computations[called]
    root = next(one for one in inside.values() if one.is_root)
    results = [inside[o] for o in root.operands] if root.operation == "tuple" else [root]
    found: list[int | None] = []
    for result in results:
        while result.operation == "bitcast" and result.operands[0] in inside:
            result = inside[result.operands[0]]
        in_place = result.operation == "dynamic-update-slice" and result.operands[1] in inside
        found.append(size(inside[result.operands[1]].type) if in_place else None)
    return found
