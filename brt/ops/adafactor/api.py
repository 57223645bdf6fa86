"""Adafactor's update of a stack of matrices, with a choice of implementations."""

from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.adafactor import pallas_tpu, xla
from brt.ops.adafactor.xla import Moments, Updated
from brt.ops.dispatch import Implementation, Op

OP = Op(
    "adafactor",
    (
        Implementation("pallas_tpu", pallas_tpu.adafactor, pallas_tpu.refusal),
        Implementation("xla", xla.adafactor),
        Implementation("pallas_interpret", pallas_tpu.interpreted, pallas_tpu.refusal),
        # `xla.adafactor` is the reference, too, because it calls optax, which defines the update.
        Implementation("reference", xla.adafactor),
    ),
)


def adafactor(
    gradient: Float[Array, "L A ..."],
    parameter: Float[Array, "L A ..."],
    moments: Moments,
    decay: Float[Array, " L"],
    rate: Float[Array, " L"],
    factor: float = 1.0,
    divisor: Float[Array, ""] | float = 1.0,
    *,
    implementation: str | None = None,
) -> Updated:
    """Updates the parameters and moments of each of L matrices with A rows and B columns.

    Args:
      gradient, parameter: [L, A, *columns]; *columns are axes that are merged to the B columns, for
        example the axes of heads and of the dimension of a head.
      decay: the share of the previous second moments in the new ones.
      rate: the learning rate.
      factor: the number by which the update of the parameter is multiplied. The momentum is not
        multiplied by it.
      divisor: the number by which the gradients are first divided.
    """
    inputs = gradient, parameter, moments, decay, rate, factor, divisor
    return dispatch.run(OP, implementation, *inputs)


def has_kernel(
    gradient: Float[Array, "L A ..."],
    parameter: Float[Array, "L A ..."],
    moments: Moments,
    implementation: str | None = None,
) -> bool:
    """Returns True if `adafactor` selects another implementation than "xla", which uses optax."""
    return dispatch.choice(OP, implementation, gradient, parameter, moments) != "xla"
