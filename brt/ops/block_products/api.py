"""Matrix products of the few rows (tokens) of a block with weight arrays, called kernels.

This module selects the implementation of each product. In shapes, *R or *rows stands for the axes
of the rows, *inputs and *outputs for the other axes, and C is the size of the axis that all kernels
share.
"""

from collections.abc import Sequence

from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.block_products import pallas_tpu, reference, xla
from brt.ops.block_products.reference import Kernels
from brt.ops.dispatch import Implementation, Op

SHARED_INPUT_MATMUL = Op(
    "shared_input_matmul",
    (
        Implementation(
            "pallas_tpu",
            pallas_tpu.shared_input_matmul,
            ("tpu",),
            ("tpu",),
            pallas_tpu.shared_input_refusal,
        ),
        Implementation("xla", xla.shared_input_matmul),
        Implementation("pallas_interpret", pallas_tpu.interpreted_shared_input_matmul, auto=()),
        Implementation("reference", reference.shared_input_matmul, auto=()),
    ),
)
SUMMED_MATMUL = Op(
    "summed_matmul",
    (
        Implementation(
            "pallas_tpu", pallas_tpu.summed_matmul, ("tpu",), ("tpu",), pallas_tpu.summed_refusal
        ),
        Implementation("xla", xla.summed_matmul),
        Implementation("pallas_interpret", pallas_tpu.interpreted_summed_matmul, auto=()),
        Implementation("reference", reference.summed_matmul, auto=()),
    ),
)


def shared_input_matmul(
    x: Float[Array, "*R C"],
    kernels: Kernels,
    *,
    transposed: bool = False,
    relu: bool = False,
    where: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Returns the products of x with several kernels (weight arrays), in the dtype of x.

    One call for all kernels lets an implementation read x once instead of once for each kernel.

    Args:
      x: the input [*rows, C].
      kernels: a sequence of kernels, each [C, *outputs], or [*outputs, C] if `transposed`; or one
        array with all kernels stacked on axis 0.
      transposed: True if the last axis of each kernel, not the first, is multiplied with x.
      relu: True returns max(product, 0) and marks the result by `dispatch.output_residual`, so that
        rematerialized layers (`jax.checkpoint`) can save it. Only forward rules of `jax.custom_vjp`
        pass True.
      where: [*rows, *outputs], an array in the shape of a product. Each product is set to 0 where
        the entry of `where` is not positive, as in the backward pass of a ReLU. None changes
        nothing.
      implementation: the name of an implementation; None takes the best one that supports the
        inputs.

    Returns:
      One array [*rows, *outputs] for each kernel.

    Raises:
      NotImplementedError: the implementation does not exist or does not support these inputs.
    """
    return dispatch.run(
        SHARED_INPUT_MATMUL,
        implementation,
        x,
        kernels,
        transposed=transposed,
        relu=relu,
        where=where,
    )


def summed_matmul(
    xs: Sequence[Float[Array, "..."]],
    kernels: Kernels,
    *,
    transposed: bool = False,
    as_bits: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*R C"]:
    """Returns the sum of the products of each input with its kernel (weight array).

    Args:
      xs: the inputs, each [*rows, *inputs].
      kernels: a sequence of kernels, each [*inputs, C], or [C, *inputs] if `transposed`; or one
        array with all kernels stacked on axis 0.
      transposed: True if the first axis of each kernel, not the last, is the output. Only backward
        rules of `jax.custom_vjp` pass True.
      as_bits: True passes the inputs to the TPU kernel as integers with the same bits. This saves a
        conversion if the inputs are results of `dispatch.output_residual`, which stores arrays of
        floating-point numbers as such integers.
      implementation: the name of an implementation; None takes the best one that supports the
        inputs.

    Returns:
      The sum [*rows, C] in the inputs' dtype. If `transposed` is False, the sum has a name
      (`checkpoint_name`) by which rematerialized layers can save it.

    Raises:
      NotImplementedError: the implementation does not exist or does not support these inputs.
    """
    return dispatch.run(
        SUMMED_MATMUL, implementation, xs, kernels, transposed=transposed, as_bits=as_bits
    )
