"""Block products in plain XLA, with one product for each kernel.

In shapes, *R stands for the axes of the rows, and C is the size of the axis that all kernels share.
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
    """Returns the products of x with several kernels, one array [*rows, *outputs] for each.

    Args:
      x: the input, whose last axis the products sum over.
      kernels: the kernels, [C, *outputs] or, if `transposed`, [*outputs, C].
      transposed: True if the products sum over the last axis of the kernels.
      relu: True returns max(product, 0) as values that rematerialized layers save.
      where: an array of the shape of a product; products are kept where it is above 0, and are 0
        elsewhere. None keeps all.
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
    """Returns the sum of the products of each input with its kernel, [*rows, C].

    Args:
      xs: the inputs, each [*rows, *inputs].
      kernels: the kernels, [*inputs, C] or, if `transposed`, [C, *inputs].
      transposed: True if the first axis of each kernel, not the last, is the output.
      as_bits: ignored. True tells the TPU kernels that layers stored the inputs as integers with
        the same bits (`dispatch.output_residual`), so that the kernels can read these integers.
        XLA's products read the inputs as floating-point numbers.
    """
    pairs = list(zip(xs, kernels, strict=True))
    if transposed:
        first, *others = (input_gradient(kernel, x) for x, kernel in pairs)
        return sum(others, first)
    if len(pairs) == 1:
        return dense_forward(*pairs[0], kernels[0].ndim - 1)[0]
    product = partial(jnp.tensordot, preferred_element_type=jnp.float32)
    first, *others = (product(x, k.astype(x.dtype), axes=k.ndim - 1) for x, k in pairs)
    # The name marks the sum as a value that rematerialized layers save. Without the name, they
    # would save each product in float32.
    return checkpoint_name(sum(others, first).astype(xs[0].dtype), dispatch.KERNEL_RESIDUAL)
