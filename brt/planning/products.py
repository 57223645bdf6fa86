"""How many numbers the instructions of an optimized module multiply with matrices."""

import re

from brt.planning import schedules
from brt.planning.hlo import Instruction, Module, shapes


def flops(module: Module, computation: str, one: Instruction) -> float:
    """Of an instruction and of all that it fuses; 0 where it multiplies no matrices."""
    if one.operation == "fusion":
        called = one.called("calls") or ""
        fused = module.computations[called].values()
        return sum(flops(module, called, inner) for inner in fused)
    if _is_product(one):
        return _product(module, computation, one)
    # A kernel, also one that writes a part of an array within a fusion.
    return schedules.flops(one.attributes) if one.operation == "custom-call" else 0.0


def _is_product(one: Instruction) -> bool:
    """Of matrices; on GPUs most are calls of cuBLAS."""
    return one.operation in ("dot", "convolution") or (
        one.operation == "custom-call" and "cublas" in one.attributes
    )


def _product(module: Module, computation: str, one: Instruction) -> float:
    """Twice the numbers that are multiplied; windows of a convolution count where they overlap."""
    inside = module.computations[computation]
    left, right = (shapes(inside[o].type)[0].dimensions for o in one.operands[:2])
    out = 1
    for dimension in one.shapes[0].dimensions:
        out *= dimension
    if one.operation != "convolution":
        pattern = r'lhs_contracting_dim(?:ension)?s(?:"?[=:])[\[{]([\d,"]*)[\]}]'
        contracted = re.search(pattern, one.attributes)
        for place in re.findall(r"\d+", contracted[1] if contracted else ""):
            out *= left[int(place)]
        return 2.0 * out
    return 2.0 * out * _summed(one, left, right)


def _summed(one: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Numbers that a convolution adds up for one of its results.

    TPUs write batched products as convolutions whose windows meet the padding almost everywhere.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    if not labels:
        return 1.0
    window = re.search(r"window=\{([^}]*)\}", one.attributes)
    text = window[1] if window else ""

    def listed(key: str, default: str) -> list[str]:
        found = re.search(rf"\b{key}=([\dx_\-]+)", text)
        return found[1].split("x") if found else [default] * len(sizes)

    sizes = [int(n) for n in m[1].split("x")] if (m := re.search(r"size=([\dx]+)", text)) else []
    pads, strides = listed("pad", "0_0"), listed("stride", "1")
    dilations, spread = listed("lhs_dilate", "1"), listed("rhs_dilate", "1")
    total = float(right[labels[2].index("i")])
    for axis, length in enumerate(sizes):
        if length == 1:
            continue
        there = left[labels[1].index(str(axis))]
        results = one.shapes[0].dimensions[labels[3].index(str(axis))]
        first, stride = int(pads[axis].split("_")[0]), int(strides[axis])
        dilation, step = int(dilations[axis]), int(spread[axis])
        if results * length > 1 << 20:
            total *= min(length, there)
            continue
        meets = sum(
            0 <= place < there * dilation and place % dilation == 0
            for result in range(results)
            for place in (result * stride + w * step - first for w in range(length))
        )
        total *= meets / results
    return total
