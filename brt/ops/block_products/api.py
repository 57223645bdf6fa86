"""Which implementation multiplies."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.block_products import pallas_tpu, reference, xla
from brt.ops.block_products.reference import Added, Kernels
from brt.ops.dispatch import Implementation, Op

SPREAD = Op(
    "spread",
    (
        Implementation(
            "pallas_tpu", pallas_tpu.spread, ("tpu",), ("tpu",), pallas_tpu.refuses_spread
        ),
        Implementation("xla", xla.spread),
        Implementation("pallas_interpret", pallas_tpu.interpreted_spread, auto=()),
        Implementation("reference", reference.spread, auto=()),
    ),
)
GATHERED = Op(
    "gathered",
    (
        Implementation(
            "pallas_tpu", pallas_tpu.gathered, ("tpu",), ("tpu",), pallas_tpu.refuses_gathered
        ),
        Implementation("xla", xla.gathered),
        Implementation("pallas_interpret", pallas_tpu.interpreted_gathered, auto=()),
        Implementation("reference", reference.gathered, auto=()),
    ),
)


def spread(
    x: Float[Array, "*R C"],
    kernels: Kernels,
    *,
    transposed: bool = False,
    relu: bool = False,
    where: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """The product of x with each kernel, in x's dtype.

    Args:
      x: [*rows, C].
      kernels: [C, *outputs] each; `transposed`: [*outputs, C]. An array has them on axis 0.
      relu: max(product, 0), `dispatch.output_residual`; for forward rules alone.
      where: [*rows, *outputs]; the result is 0 where it is not positive.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      [*rows, *outputs] of each kernel.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        SPREAD, implementation, x, kernels, transposed=transposed, relu=relu, where=where
    )


def gathered(
    xs: Sequence[Float[Array, "..."]],
    kernels: Kernels,
    *,
    transposed: bool = False,
    as_bits: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*R C"]:
    """The sum of the products of each x with its kernel, in their dtype.

    It is `dispatch.output_residual`, but `transposed` ones, which are of backward rules.

    Args:
      xs: [*rows, *inputs] each.
      kernels: [*inputs, C] each; `transposed`: [C, *inputs]. An array has them on axis 0.
      as_bits: xs are read as bits, which they were `dispatch.output_residual` as.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      [*rows, C].

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        GATHERED, implementation, xs, kernels, transposed=transposed, as_bits=as_bits
    )[0]


def summed(
    xs: Sequence[Float[Array, "..."]],
    kernels: Sequence[Float[Array, "..."]],
    added: Added,
    *,
    transposed: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "*R C"], dict[int, Array]]:
    """`gathered` of sums, and those.

    Args:
      added: of some xs, by their place, what is added to them.
    """
    return dispatch.run(GATHERED, implementation, xs, kernels, transposed=transposed, added=added)
