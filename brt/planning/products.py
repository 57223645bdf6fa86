"""Counts the FLOPs of the matrix products in an optimized HLO module."""

import re

from brt.planning import schedules
from brt.planning.hlo import Instruction, Module, shapes


def flops(module: Module, computation: str, instruction: Instruction) -> float:
    """Returns the FLOPs of the matrix products of an instruction, also of those inside a fusion."""
    if instruction.operation == "fusion":
        called = instruction.called("calls") or ""
        fused = module.computations[called].values()
        return sum(flops(module, called, inner) for inner in fused)
    if _is_product(instruction):
        return _product(module, computation, instruction)
    # A custom call of a Pallas kernel states the kernel's FLOPs. A call inside of a fusion is also
    # counted here, because the sum above calls this function for each instruction of the fusion.
    return (
        schedules.flops(instruction.attributes) if instruction.operation == "custom-call" else 0.0
    )


def _is_product(instruction: Instruction) -> bool:
    """Returns True for matrix products; on GPUs most of them are calls of cuBLAS."""
    return instruction.operation in ("dot", "convolution") or (
        instruction.operation == "custom-call" and "cublas" in instruction.attributes
    )


def _product(module: Module, computation: str, instruction: Instruction) -> float:
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
