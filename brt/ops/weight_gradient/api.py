"""The gradient of a weight that all steps of a loop use, with a choice of implementations.

The loop collects the inputs x and the output gradients dy of its products. The gradient of the
weight is the sum of x^T dy over all steps, which is computed once, after the loop.
"""

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
    """Returns the gradient of a weight [*inputs, *outputs] that N steps of a loop use, in float32.

    Each step multiplies its input x by the weight. The gradient is the sum of x^T dy over all
    steps and rows.

    Args:
      x: [N, *rows, *inputs], the input of the product in each step; *rows stands for any axes.
      dy: [N, *rows, *outputs], the gradient of the product in each step.
      inputs: the number of the weight's input axes.
      outputs: the number of the weight's output axes.
      as_bits: True if x was computed by `dispatch.output_residual` from stored unsigned integers
        that have the bits of x. A kernel may then read these integers, so that XLA makes no copy
        of x. The argument x itself has a floating-point dtype in any case.
      implementation: the name of an implementation; None takes the best one that supports the
        inputs.

    Raises:
      NotImplementedError: the implementation does not exist or does not support these inputs.
    """
    return dispatch.run(OP, implementation, x, dy, inputs, outputs, as_bits=as_bits)
