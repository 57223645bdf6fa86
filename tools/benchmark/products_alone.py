"""Finds the matrix products of a compiled step, and builds a program that computes only them.

The time of this program is a lower bound of the time of a step with the same products.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array

from brt.planning.compiled import Instruction, Module


class Factor(NamedTuple):
    """An operand of a product.

    Attributes:
      shape: sizes of the axes in the order in which they are in memory.
      summed: indices of the axes that the product sums over.
      batch: indices of the batch axes.
    """

    shape: tuple[int, ...]
    summed: tuple[int, ...]
    batch: tuple[int, ...]


class Product(NamedTuple):
    left: Factor
    right: Factor

    @property
    def flops(self) -> int:
        shape, *used = self.right
        others = [size for axis, size in enumerate(shape) if axis not in (*used[0], *used[1])]
        return 2 * math.prod(self.left.shape) * math.prod(others)


def products(text: str) -> Counter[Product]:
    """Counts how often a compiled module runs each product.

    Args:
      text: the result of `as_text()` of a program that is compiled for CPUs.
    """
    module, found = Module(text), Counter()
    for computation, outer, times in module.executed_instructions():
        fused = outer.called("calls") if outer.operation == "fusion" else None
        inside = module.computations[fused or computation]
        for one in inside.values() if fused else [outer]:
            if one.operation == "dot":
                sides = zip((inside[name] for name in one.operands), ("lhs", "rhs"), strict=True)
                found[Product(*(_factor(array, one, side) for array, side in sides))] += times
    return found


def _factor(array: Instruction, product: Instruction, side: str) -> Factor:
    sizes = array.shapes[0].dimensions
    layout = re.search(r"\]\{([\d,]+)", array.type)
    order = [int(axis) for axis in reversed(layout[1].split(","))] if layout else []

    def axes(kind: str) -> tuple[int, ...]:
        listed = re.search(rf"{side}_{kind}_dims=\{{([\d,]+)\}}", product.attributes)
        return tuple(order.index(int(axis)) for axis in listed[1].split(",")) if listed else ()

    return Factor(tuple(sizes[axis] for axis in order), axes("contracting"), axes("batch"))


def program(found: Counter[Product]) -> tuple[Callable[[list], list], list[tuple[Array, Array]]]:
    """Returns a function that computes all counted products, and random operands for it."""
    listed = list(found.elements())

    def multiply(factors: list[tuple[Array, Array]]) -> list[Array]:
        return [
            jax.lax.dot_general(
                *pair, ((left.summed, right.summed), (left.batch, right.batch)),
                preferred_element_type="float32",
            )
            for pair, (left, right) in zip(factors, listed, strict=True)
        ]  # fmt: skip

    keys = jax.random.split(jax.random.key(0), 2 * len(listed)).reshape(-1, 2)
    shapes = ((left.shape, right.shape) for left, right in listed)
    return multiply, [
        (jax.random.normal(a, left), jax.random.normal(b, right))
        for (a, b), (left, right) in zip(keys, shapes, strict=True)
    ]
