"""Which implementation adds up the steps' products."""

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
    """The sum over steps and rows of x^T dy, float32.

    Args:
      x: [N, *rows, *inputs], of N steps of a loop.
      dy: [N, *rows, *outputs].
      inputs, outputs: how many axes.
      as_bits: x is read as bits, which it was `dispatch.output_residual` as: no copy makes numbers
        of them.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      [*inputs, *outputs].

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(OP, implementation, x, dy, inputs, outputs, as_bits=as_bits)
