"""Selection of the implementation of weight gradients."""

from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.weight_gradient import pallas_tpu, reference, xla

OP = Op(
    "weight_gradient",
    (
        Implementation(
            "pallas_tpu", pallas_tpu.weight_gradient, ("tpu",), ("tpu",), pallas_tpu.refusal
        ),
        Implementation("xla", xla.weight_gradient),
        Implementation("pallas_interpret", pallas_tpu.interpreted, auto=()),
        Implementation("reference", reference.weight_gradient, auto=()),
    ),
)


def weight_gradient(
    x: Float[Array, "N ..."],
    dy: Float[Array, "N ..."],
    inputs: int = 1,
    outputs: int = 1,
    *,
    as_bits: bool = False,
    implementation: str | None = None,
) -> Float[Array, "..."]:
    """Returns the gradient of a kernel [*inputs, *outputs] that N steps of a loop use, in float32.

    The gradient is the sum of x^T dy over all steps and rows.

    Args:
      x: [N, *rows, *inputs], the factors that the kernel was multiplied with in each step.
      dy: [N, *rows, *outputs], the gradients of the products in each step.
      inputs: the number of the kernel's input axes.
      outputs: the number of the kernel's output axes.
      as_bits: True if x consists of integers with the bits of the numbers, as
        `dispatch.output_residual` stores them.
      implementation: the name of an implementation; None takes the best one that supports the
        inputs.

    Raises:
      NotImplementedError: the implementation does not exist or does not support these inputs.
    """
    return dispatch.run(OP, implementation, x, dy, inputs, outputs, as_bits=as_bits)
