"""RMS normalization of an input that a residual connection reads, too, with a choice of
implementations.
"""

from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.normalization import EPSILON
from brt.ops.residual_norm import pallas_tpu, reference, xla

OP = Op(
    "residual_norm",
    (
        Implementation(
            "pallas_tpu", pallas_tpu.residual_norm, ("tpu",), ("tpu",), pallas_tpu.refusal
        ),
        Implementation("xla", xla.residual_norm),
        Implementation(
            "pallas_interpret", pallas_tpu.interpreted, auto=(), refusal=pallas_tpu.refusal
        ),
        Implementation("reference", reference.residual_norm, auto=()),
    ),
)


def residual_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    epsilon: float = EPSILON,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns x / rms(x) * scale, as `brt.ops.normalization.rms_norm`, and x.

    If the residual connection reads the second result instead of x, a backward pass can add the
    gradients of both in the pass over x that computes the gradient of the norm.

    Args:
      x: the vectors.
      scale: the factor of each number of a vector.
      epsilon: added to the mean square, whose root is rms(x).
      implementation: the name of an implementation; None takes the best one that supports the
        inputs.

    Raises:
      NotImplementedError: the implementation does not exist or does not support these inputs.
    """
    return dispatch.run(OP, implementation, x, scale, epsilon)
