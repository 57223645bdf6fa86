"""Reference implementation of the products of a block's rows (tokens) with weight arrays (kernels).

In shapes, *R or *rows stands for the axes of the rows, *inputs and *outputs for the other axes, C
is the size of the axis that all kernels share, and P is the number of kernels.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

# The kernels (weight arrays) of several products are a sequence of arrays, or one array in which
# they are stacked on axis 0.
Kernels = Sequence[Float[Array, "..."]] | Float[Array, "P ..."]


def shared_input_matmul(
    x: Float[Array, "*R C"],
    kernels: Kernels,
    *,
    transposed: bool = False,
    relu: bool = False,
    where: Array | None = None,
) -> tuple[Array, ...]:
    """Returns the products of x with several kernels (weight arrays), one array [*rows, *outputs]
    for each kernel.

    Args:
      x: the input, whose last axis the products sum over.
      kernels: the kernels, [C, *outputs] or, if `transposed`, [*outputs, C].
      transposed: True if the products sum over the last axis of the kernels.
      relu: True replaces negative products by 0.
      where: an array in the shape of a product; each product is set to 0 where the entry of `where`
        is not positive. None changes nothing.
    """
    wide = x.astype(jnp.float32)
    products = [jnp.tensordot(wide, k, axes=(-1, -1 if transposed else 0)) for k in kernels]
    if relu:
        products = [jnp.maximum(y, 0) for y in products]
    if where is not None:
        products = [jnp.where(where > 0, y, 0) for y in products]
    return tuple(y.astype(x.dtype) for y in products)


def summed_matmul(
    xs: Sequence[Float[Array, "..."]],
    kernels: Kernels,
    *,
    transposed: bool = False,
    as_bits: bool = False,
) -> Float[Array, "*R C"]:
    """Returns the sum [*rows, C] of the products of each input with its kernel (weight array).

    Args:
      xs: the inputs, each [*rows, *inputs].
      kernels: the kernels, [*inputs, C] or, if `transposed`, [C, *inputs].
      transposed: True if the first axis of each kernel, not the last, is the output.
      as_bits: ignored. True tells the TPU kernel to read the inputs as integers with the same bits,
        which saves a conversion.
    """
    total = jnp.zeros(())
    for x, kernel in zip(xs, kernels, strict=True):
        inputs = kernel.ndim - 1
        kernel_axes = tuple(range(1, kernel.ndim) if transposed else range(inputs))
        x_axes = tuple(range(x.ndim - inputs, x.ndim))
        total += jnp.tensordot(x.astype(jnp.float32), kernel, axes=(x_axes, kernel_axes))
    return total.astype(xs[0].dtype)
