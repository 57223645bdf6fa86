"""Computes the bytes that an instruction of an HLO module reads and writes.

If an instruction reads or updates only some slices or rows of an array, only these are counted.
"""

from collections.abc import Mapping

from brt.planning.hlo import Instruction, Module, Shape, shapes, size

# These operations read no more of their first operand than their result has.
_SLICES = "slice", "dynamic-slice", "gather"
# These operations update their first operand in place; the number is the index of the operand that
# has the new values.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# The type of an asynchronous copy is a tuple; `_STARTS` has the index of the result in the tuple.
_STARTS = {"copy-start": 0, "slice-start": 1}


def traffic(module: Module, computation: str, instruction: Instruction, anywhere: bool) -> int:
    """Returns the bytes that an instruction reads and writes in the main memory (HBM).

    If `anywhere` is True, the bytes in all memories are counted.
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
        # A scatter reads the old values, which it adds to, and the indices.
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
    """Returns the bytes of each parameter, by index, that a fused computation slices."""
    inside = module.computations[called].values()
    sizes = {
        int(instruction.body): _sliced(module, called, instruction.name)
        for instruction in inside
        if instruction.operation == "parameter"
    }
    return {index: size for index, size in sizes.items() if size is not None}


def _sliced(module: Module, computation: str, name: str) -> int | None:
    """Returns the bytes of the slices of an array that are read; None if all of it is read."""
    users = [
        instruction
        for instruction in module.computations[computation].values()
        if name in instruction.operands
    ]
    parts: list[int | None] = [None] if not users else []
    for user in users:
        if user.operation == "bitcast":
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
    """Returns the bytes that a fusion writes of each result updated in place; None for others."""
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
    """Returns the bytes of the new values of an update in place."""
    return size(inside[update.operands[_UPDATES[update.operation]]].type)
