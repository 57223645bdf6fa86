"""Choice of the implementation of weight gradients."""

from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.weight_gradient import pallas_tpu, reference, xla

OP = Op(
    "weight_gradient",
    (
        Implementation(
            "pallas_tpu", pallas_tpu.weight_gradient, ("tpu",), ("tpu",), pallas_tpu.refuses
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
    """Returns the sum of x^T dy over steps and rows, in float32.

    Args:
      x: [N, *rows, *inputs] for N steps of a loop.
      dy: [N, *rows, *outputs].
      inputs, outputs: number of axes.
      as_bits: True if x is the bits of a `dispatch.output_residual`, which are then read without
        conversion.
      implementation: the name of an implementation; None takes the best one that supports the
        inputs.

    Returns:
      [*inputs, *outputs].

    Raises:
      NotImplementedError: the implementation does not exist or does not support these inputs.
    """
    return dispatch.run(OP, implementation, x, dy, inputs, outputs, as_bits=as_bits)
