"""What kernels for TPUs share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

LANES = 128  # of a vector register
VMEM_BYTES = 64 * 2**20  # that a kernel may take

# Which axes of two matrices a product sums over.
BY_ROW = (((1,), (1,)), ((), ()))  # a b^T
BY_SLOT = (((0,), (0,)), ((), ()))  # a^T b
PLAIN = (((1,), (0,)), ((), ()))  # a b


def product(a: Array, b: Array, axes: tuple) -> Array:
    """Float32; of float32 at full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def whole(*shape: int) -> Any:
    """Where a step of the grid (heads, lanes, ...) finds its part of an array [B, H, *shape]."""
    return pl.BlockSpec((None, None, *shape), lambda h, b, *_: (b, h, *(0 for _ in shape)))


def heads_first(axes: int) -> pltpu.CompilerParams:
    """Of a grid whose first axis is that of heads: cores that share a chip share them."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", *["arbitrary"] * (axes - 1)), vmem_limit_bytes=VMEM_BYTES
    )
