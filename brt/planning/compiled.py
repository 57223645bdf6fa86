"""Costs of a compiled step by part of the model: operations, bytes, cycles, collectives.

The costs are computed from the optimized HLO module, the text form of the compiled program. The
body of a loop counts as often as the loop runs. The `cost_analysis` of the compilers counts the
body only once.

A module consists of computations, which are lists of instructions. An instruction may call another
computation, such as the body of a loop. If an instruction reads or updates only some slices or rows
of an array, only these count as the instruction's bytes. In arguments and variables, `computation`
is the name of the computation that contains an instruction, `called` is the name of the computation
of a fusion, and `inside` has the instructions of a computation.

The compiler starts some collectives early, so that they run while the device computes. In the text
of a program, such a collective has a start and a done instruction, and the instructions between the
two run at the same time. TPUs also have fusions that start a collective: their computation contains
the collective, and their names begin with `async-collective-start`.
"""

import collections
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from brt.planning import kernel_cycles
from brt.planning.topologies import CHIPS

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
    is_root: bool  # True if the computation returns the result of this instruction

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

    `computations` maps the name of each computation to a dictionary, which maps names to the
    computation's instructions. `entry` is the name of the computation that runs first.
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
        """Returns the number of iterations of a `while` instruction; 1 if it is not found."""
        stated = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if stated:
            return int(stated[1])
        condition = self.computations.get(loop.called("condition") or "", {})
        for instruction in condition.values():
            # The condition compares a counter with a constant. The counter is a signed integer in
            # loops of JAX, and u32 in loops over the shards of a matrix, which XLA inserts.
            integer = re.match(r"[su](32|64)\[\]", instruction.type)
            if instruction.operation == "constant" and integer:
                return int(instruction.body)
        return 1

    def executed_instructions(
        self, computation: str = "", times: int = 1
    ) -> Iterator[tuple[str, Instruction, int]]:
        """Yields (name of its computation, instruction, number of executions) for each instruction.

        They are all instructions that run when `computation` ("" stands for the entry) runs `times`
        times, including the ones in its loops, branches and calls. Instructions within a fusion are
        left out, because the fusion runs as one instruction.
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
    """Yields one line per instruction; the several lines of a kernel's attributes are joined."""
    pending = ""
    for line in text.splitlines():
        if line.startswith(('"', "}")) and not _END.match(line):
            pending += line
            continue
        yield pending
        pending = line
    yield pending


def _parse(name: str, rest: str, is_root: bool) -> Instruction:
    """Returns the instruction whose line has `name` before the equals sign, and `rest` after it."""
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


def product_flops(module: Module, computation: str, instruction: Instruction) -> float:
    """Returns the FLOPs of an instruction's matrix products; a fusion may contain several."""
    if instruction.operation == "fusion":
        called = instruction.called("calls") or ""
        fused = module.computations[called].values()
        return sum(product_flops(module, called, inner) for inner in fused)
    if _is_product(instruction):
        return _flops_of_product(module, computation, instruction)
    # A custom call of a Pallas kernel states the kernel's FLOPs. A call inside of a fusion is also
    # counted here, because the sum above calls this function for each instruction of the fusion.
    return (
        kernel_cycles.flops(instruction.attributes)
        if instruction.operation == "custom-call"
        else 0.0
    )


def _is_product(instruction: Instruction) -> bool:
    """Returns True for matrix products; on GPUs most of them are calls of cuBLAS."""
    return instruction.operation in ("dot", "convolution") or (
        instruction.operation == "custom-call" and "cublas" in instruction.attributes
    )


def _flops_of_product(module: Module, computation: str, instruction: Instruction) -> float:
    """Returns the FLOPs of a matrix product, which may be expressed as a convolution."""
    inside = module.computations[computation]
    left, right = (shapes(inside[o].type)[0].dimensions for o in instruction.operands[:2])
    out = 1
    for dimension in instruction.shapes[0].dimensions:
        out *= dimension
    if instruction.operation != "convolution":
        pattern = r'lhs_contracting_dim(?:ension)?s(?:"?[=:])[\[{]([\d,"]*)[\]}]'
        contracted = re.search(pattern, instruction.attributes)
        for axis in re.findall(r"\d+", contracted[1] if contracted else ""):
            out *= left[int(axis)]
        return 2.0 * out
    return 2.0 * out * _summands(instruction, left, right)


def _summands(instruction: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Returns the mean number of products that a convolution sums for one result.

    TPU compilers express batched matrix products as convolutions whose windows consist mostly of
    padding, which costs nothing.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not labels:
        return 1.0
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    text = window[1] if window else ""

    def window_numbers(key: str, default: str) -> list[str]:
        match = re.search(rf"\b{key}=([\dx_\-]+)", text)
        return match[1].split("x") if match else [default] * len(sizes)

    sizes = [int(n) for n in m[1].split("x")] if (m := re.search(r"size=([\dx]+)", text)) else []
    pads, strides = window_numbers("pad", "0_0"), window_numbers("stride", "1")
    dilations, window_dilations = (
        window_numbers("lhs_dilate", "1"),
        window_numbers("rhs_dilate", "1"),
    )
    total = float(right[labels[2].index("i")])
    for axis, length in enumerate(sizes):
        if length == 1:
            continue
        input_length = left[labels[1].index(str(axis))]
        results = instruction.shapes[0].dimensions[labels[3].index(str(axis))]
        first, stride = int(pads[axis].split("_")[0]), int(strides[axis])
        dilation, step = int(dilations[axis]), int(window_dilations[axis])
        if results * length > 1 << 20:
            total *= min(length, input_length)
            continue
        overlaps = sum(
            0 <= position < input_length * dilation and position % dilation == 0
            for result in range(results)
            for position in (result * stride + w * step - first for w in range(length))
        )
        total *= overlaps / results
    return total


# These operations read at most as many bytes of their first operand as their result has.
_SLICES = "slice", "dynamic-slice", "gather"
# These operations update their first operand in place. The number is the index of the operand that
# has the new values.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# The type of an asynchronous copy is a tuple; `_STARTS` has the index of the result in the tuple.
_STARTS = {"copy-start": 0, "slice-start": 1}


def traffic(module: Module, computation: str, instruction: Instruction, anywhere: bool) -> int:
    """Returns the bytes that an instruction reads and writes in the main memory (HBM).

    If `anywhere` is True, the bytes in all memories count, except that a copy from one memory to
    another counts 0 bytes.
    """
    inside = module.computations[computation]
    sources = [shapes(inside[o].type) if o in inside else [] for o in instruction.operands]
    if anywhere and (
        instruction.operation in _STARTS or _copies_between_memories(instruction, sources)
    ):
        return 0
    read = [
        0 if not anywhere and all(x.on_chip for x in source) else sum(x.bytes for x in source)
        for source in sources
    ]
    written = [0 if shape.on_chip and not anywhere else shape.bytes for shape in instruction.shapes]
    if instruction.operation == "fusion":
        called = instruction.called("calls") or ""
        for i, part in _slices(module, called).items():
            read[i] = min(read[i], part)
        for i, update in enumerate(_updates(module, called)):
            written[i] = written[i] if update is None else min(written[i], update)
    elif instruction.operation in _STARTS:
        result = instruction.shapes[_STARTS[instruction.operation]]
        read, written = [min(read[0], result.bytes)], [0 if result.on_chip else result.bytes]
    elif instruction.operation in _SLICES:
        indices = read[1:] if instruction.operation == "gather" else []
        read = [min(read[0], size(instruction.type)), *indices]
    elif instruction.operation in _UPDATES:
        source, update = _UPDATES[instruction.operation], _updated(inside, instruction)
        # A scatter also reads the indices, and the old values, to which it adds the new ones.
        old = [min(read[0], update), read[1]] if instruction.operation == "scatter" else []
        read, written = [*old, read[source]], [min(written[0], update)]
    return sum(read) + sum(written)


def _copies_between_memories(instruction: Instruction, sources: list[list[Shape]]) -> bool:
    """Returns True if an instruction copies an array from one memory to another."""
    memories = {
        shape.on_chip for shape in (*instruction.shapes, *(x for group in sources for x in group))
    }
    return instruction.operation == "copy" and len(memories) == 2


def _slices(module: Module, called: str) -> dict[int, int]:
    """Returns how many bytes a fusion reads of each parameter that it only slices or updates.

    The keys are the indices of these parameters.
    """
    inside = module.computations[called].values()
    sizes = {
        int(instruction.body): _sliced(module, called, instruction.name)
        for instruction in inside
        if instruction.operation == "parameter"
    }
    return {index: size for index, size in sizes.items() if size is not None}


def _sliced(module: Module, computation: str, name: str) -> int | None:
    """Returns how many bytes of an array are read in slices; None if the whole array is read."""
    users = [
        instruction
        for instruction in module.computations[computation].values()
        if name in instruction.operands
    ]
    parts: list[int | None] = [None] if not users else []
    for user in users:
        if user.operation in ("bitcast", "convert", "multiply"):
            parts.append(_sliced(module, computation, user.name))
        elif user.operation == "fusion":
            inner = _slices(module, user.called("calls") or "")
            parts += [inner.get(i) for i, operand in enumerate(user.operands) if operand == name]
        elif user.operation in _SLICES and user.operands[0] == name:
            parts.append(size(user.type))
        elif user.operation in _UPDATES and user.operands[0] == name:
            old = _updated(module.computations[computation], user)
            parts.append(old if user.operation == "scatter" else 0)
        else:
            parts.append(None)
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _updates(module: Module, called: str) -> list[int | None]:
    """Returns, for each result of a fusion, how many bytes of it the fusion writes.

    An entry is None if all bytes are written. Fewer are written to results updated in place.
    """
    inside = module.computations[called]
    root = next(instruction for instruction in inside.values() if instruction.is_root)
    results = [inside[o] for o in root.operands] if root.operation == "tuple" else [root]
    sizes: list[int | None] = []
    for result in results:
        while result.operation == "bitcast" and result.operands[0] in inside:
            result = inside[result.operands[0]]
        sizes.append(_updated(inside, result) if result.operation in _UPDATES else None)
    return sizes


def _updated(inside: Mapping[str, Instruction], update: Instruction) -> int:
    """Returns how many bytes an in-place update writes."""
    return size(inside[update.operands[_UPDATES[update.operation]]].type)


COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip
BETWEEN_SLICES = " between slices"
# Data between slices of TPUs go through the hosts, by `send` and `recv` with these attributes.
_HOST_TRANSFER = re.compile(
    r'_xla_host_transfer_rendezvous="([^"]+)".*_xla_megascale_transfer_type="(\w+)"'
)
_FUSED_START, _FUSED_DONE = "async-collective-start", "async-collective-done"


class Overlap(NamedTuple):
    """A collective that runs beside other instructions."""

    kind: str  # such as all-gather
    times: int  # number of executions in a step
    bytes: int  # bytes of the result of one execution
    cycles: float  # cycles of the instructions between start and end of one execution


class Overlaps:
    """Finds the collectives of a program that run beside other instructions.

    The methods are called for all instructions in the order of the program. `found` has the
    collectives that have ended so far.
    """

    def __init__(self, module: Module):
        self.found: list[Overlap] = []
        self._module = module
        self._work = 0.0  # cycles of all instructions so far; one in a loop counts once
        self._running: dict[str, Overlap] = {}

    def started(self, instruction: Instruction, times: int) -> Overlap | None:
        """Returns the collective that an instruction starts; None if it starts none."""
        if not (collective := self._collective(instruction)):
            return None
        kind = collective.operation.removesuffix("-start")
        started = Overlap(kind, times, result_bytes(collective), self._work)
        self._running[instruction.name] = started
        return started

    def ended(self, instruction: Instruction) -> bool:
        """Returns True if an instruction waits for the end of a collective.

        The collective is then added to `found`.
        """
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
GPUS = "a100", "h100", "h200"
_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id",
    "opt-barrier",
}  # fmt: skip


class Cost(NamedTuple):
    """Costs of one step on one device."""

    flops: float = 0.0  # floating-point operations of matrix products
    bytes: float = 0.0  # bytes read from and written to the main memory (HBM)
    # A lower bound of the step's cycles, without waiting for other devices; 0 if unknown. It uses
    # the compiler's estimates and, for a Pallas kernel, the largest of three times: the time of its
    # schedule, of its products at the chip's peak rate, and of its bytes at the memory's bandwidth.
    # For GPUs, see `_gpu_cycles`.
    cycles: float = 0.0
    # Bytes read from and written to any memory, including on-chip memory; copies from one memory to
    # another do not count.
    bytes_anywhere: float = 0.0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


class CollectiveCost(NamedTuple):
    """Costs of one kind of collective operation in a step on one device.

    A kind is, for example, "all-reduce" within slices or "all-reduce between slices". The latter
    crosses the network of the data centre.
    """

    times: int = 0  # number of executions
    bytes: int = 0  # bytes of the results of all executions


class InstructionGroup(NamedTuple):
    """Instructions that differ only in the numbers in their names, as those of equal layers do."""

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
    # The sum of the cycles of the Pallas kernels whose products or bytes take longer at the chip's
    # peak rates than the kernel's schedule. For these, `parts` has the cycles at the peak rates.
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
    # Maps the name of each transfer between slices to its kind and its cost.
    transfers: dict[str, tuple[str, CollectiveCost]] = {}
    for computation, instruction, times in module.executed_instructions():
        if transfer := _HOST_TRANSFER.search(instruction.attributes):
            if instruction.operation in ("send", "recv"):
                name, most = transfer[1], times * instruction.shapes[0].bytes
                if name in transfers:
                    most = max(most, transfers[name][1].bytes)
                transfers[name] = transfer[2], CollectiveCost(times, most)
            continue
        started = overlaps.started(instruction, times)
        if overlaps.ended(instruction):
            continue
        if started or instruction.operation in COLLECTIVES:
            kind = started.kind if started else instruction.operation
            before = collectives[kind]
            size = started.bytes if started else result_bytes(instruction)
            collectives[kind] = CollectiveCost(before.times + times, before.bytes + times * size)
            continue
        cost = instruction_cost(module, computation, instruction, chip)
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
                unknown |= kernel_cycles.kernels(instruction.attributes)
            elif 0 < kernel_cycles.cycles(instruction.attributes, chip) < cost.cycles:
                at_peak += times * cost.cycles
    for kind, crossing in transfers.values():
        name = kind.lower().replace("_", "-") + BETWEEN_SLICES
        times, size = collectives[name]
        collectives[name] = CollectiveCost(times + crossing.times, size + crossing.bytes)
    ordered = sorted(groups.values(), key=lambda x: (-x.cost.cycles, -x.cost.bytes_anywhere))
    return Costs(
        dict(parts), dict(collectives), tuple(sorted(unknown)), tuple(ordered),
        tuple(overlaps.found), at_peak,
    )  # fmt: skip


def _group_key(instruction: Instruction, source: str) -> tuple[str, str, str]:
    """Returns the `operation`, `result` and `source` of an instruction's `InstructionGroup`."""
    name = re.sub(r"(\.\d+)+$", "", instruction.name)
    result = re.sub(r"\{[^{}]*\}", "", instruction.type)
    return name, result, re.sub(r"\d+", "#", source.split(";")[0])


def part_of(source: str) -> str:
    """Returns the part of the model, such as "attention", of an instruction with this `source`."""
    return next((part for scope, part in PARTS.items() if scope in source), OTHER)


def _neighbour(module: Module, computation: str, instruction: Instruction) -> str:
    """Returns the `source` of an operand or, if none has one, of a user; "" if no user has one."""
    inside = module.computations[computation]
    for operand in instruction.operands:
        if operand in inside and inside[operand].source:
            return inside[operand].source
    users = (other for other in inside.values() if instruction.name in other.operands)
    return next((user.source for user in users if user.source), "")


def instruction_cost(
    module: Module, computation: str, instruction: Instruction, chip: str = ""
) -> Cost:
    """Returns the costs of one execution of an instruction."""
    # The cost of an asynchronous operation is counted at its start instruction.
    done = instruction.operation.endswith("-done")
    if done or instruction.operation in _FREE or "AllocateBuffer" in instruction.attributes:
        return Cost()
    flops = product_flops(module, computation, instruction)
    main_memory, anywhere = (
        traffic(module, computation, instruction, flag) for flag in (False, True)
    )
    # A kernel may read an array several times, but `traffic` counts each array once.
    repeated = max(0, kernel_cycles.bytes_accessed(instruction.attributes) - anywhere)
    main_memory, anywhere = main_memory + repeated, anywhere + repeated
    cycles = float(instruction.cycles)
    if chip in GPUS:
        cycles = _gpu_cycles(flops, main_memory, chip) if flops or main_memory else 0.0
    elif not cycles and (scheduled := kernel_cycles.cycles(instruction.attributes, chip)):
        cycles = max(scheduled, *_least(flops, main_memory, chip))
    return Cost(flops, main_memory, cycles, anywhere)


def _gpu_cycles(flops: float, size: int, chip: str) -> float:
    """Returns an estimate of the cycles of a GPU kernel, including 2 us for its start.

    On an H100, large products reached 748 of 989 TFLOP/s, and large copies 3 of 3.35 TB/s. The
    kernel is assumed to reach the same shares of its chip's peak rates.
    """
    products, memory = _least(flops, size, chip)
    return max(products * 989 / 748, memory * 3.35 / 3) + 2e-6 * CHIPS[chip].clock


def _least(flops: float, size: int, chip: str) -> tuple[float, float]:
    """Returns the minimum cycles for products and for memory traffic at the chip's peak rates.

    The compiler's schedule of a kernel does not include waiting for memory, so the kernel takes at
    least these cycles.
    """
    known = CHIPS[chip]
    return flops / known.flops * known.clock, size / known.bandwidth * known.clock
