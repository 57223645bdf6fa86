"""Choice of the implementation of block products."""

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
    """Returns the products of x with several kernels, in the dtype of x.

    Args:
      x: [*rows, C].
      kernels: [C, *outputs] each, or [*outputs, C] if `transposed`. An array holds several kernels
        on axis 0.
      relu: True returns max(product, 0) as a `dispatch.output_residual`; only for forward rules.
      where: [*rows, *outputs]; results are 0 where this is not positive.
      implementation: the name of an implementation; None takes the best one that supports the
        inputs.

    Returns:
      [*rows, *outputs] for each kernel.

    Raises:
      NotImplementedError: the implementation does not exist or does not support these inputs.
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
    """Returns the sum of the products of each x with its kernel, in their dtype.

    The result is a `dispatch.output_residual`, except for `transposed` kernels, which only backward
    rules use.

    Args:
      xs: [*rows, *inputs] each.
      kernels: [*inputs, C] each, or [C, *inputs] if `transposed`. An array holds several kernels on
        axis 0.
      as_bits: True if xs are bits of a `dispatch.output_residual`.
      implementation: the name of an implementation; None takes the best one that supports the
        inputs.

    Returns:
      [*rows, C].

    Raises:
      NotImplementedError: the implementation does not exist or does not support these inputs.
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
    """Returns `gathered` of xs to some of which other arrays are added first, and the sums.

    Args:
      added: arrays to add, by the index of their x.
    """
    return dispatch.run(GATHERED, implementation, xs, kernels, transposed=transposed, added=added)
