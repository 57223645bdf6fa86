"""Products of a block's rows (tokens) with weight arrays (kernels) in plain XLA.

XLA computes one matrix product for each kernel.

In shapes, *R or *rows stands for the axes of the rows, *inputs and *outputs for the other axes, and
C is the size of the axis that all kernels share.
"""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.block_products.reference import Kernels
from brt.ops.dense import dense_forward, input_gradient
from brt.ops.tpu import materialized


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
      relu: True returns max(product, 0) and marks the result by `dispatch.output_residual`, so that
        rematerialized layers (`jax.checkpoint`) can save it.
      where: an array in the shape of a product; each product is set to 0 where the entry of `where`
        is not positive. None changes nothing.
    """
    if transposed:
        products = [input_gradient(kernel, x, kernel.ndim - 1) for kernel in kernels]
    else:
        products = [dense_forward(x, kernel, 1)[0] for kernel in kernels]
    if relu:
        bits = (dispatch.to_bits(jnp.maximum(y, 0)) for y in products)
        products = [dispatch.output_residual(materialized(y), x.dtype) for y in bits]
    if where is not None:
        products = [jnp.where(where > 0, y, 0) for y in products]
    return tuple(products)


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
    pairs = list(zip(xs, kernels, strict=True))
    if transposed:
        first, *others = (input_gradient(kernel, x) for x, kernel in pairs)
        return sum(others, first)
    if len(pairs) == 1:
        return dense_forward(*pairs[0], kernels[0].ndim - 1)[0]
    product = partial(jnp.tensordot, preferred_element_type=jnp.float32)
    first, *others = (product(x, k.astype(x.dtype), axes=k.ndim - 1) for x, k in pairs)
    # A rematerialized layer may save the results of matrix products, and values with a name. The
    # name makes it save the sum, in the dtype of the inputs. Without the name, it would save each
    # product, in float32, and compute the sum again.
    return checkpoint_name(sum(others, first).astype(xs[0].dtype), dispatch.KERNEL_RESIDUAL)
