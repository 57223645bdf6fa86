"""Reference implementation of block products."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp
from jaxtyping import Array, Float

# Kernels are given as a sequence of arrays, or stacked on axis 0 of one array.
Kernels = Sequence[Float[Array, "..."]] | Float[Array, "P ..."]
# The keys are indices of inputs; each array is added to the input of its index.
Added = Mapping[int, Array]
NOTHING: Added = MappingProxyType({})


def shared_input_matmul(
    x: Float[Array, "*R C"],
    kernels: Kernels,
    *,
    transposed: bool = False,
    relu: bool = False,
    where: Array | None = None,
) -> tuple[Array, ...]:
    """Returns the products of x with several kernels, one array [*rows, *outputs] for each.

    The arguments are those of `block_products.shared_input_matmul`.
    """
    wide = x.astype(jnp.float32)
    found = [jnp.tensordot(wide, k, axes=(-1, -1 if transposed else 0)) for k in kernels]
    if relu:
        found = [jnp.maximum(y, 0) for y in found]
    if where is not None:
        found = [jnp.where(where > 0, y, 0) for y in found]
    return tuple(y.astype(x.dtype) for y in found)


def summed_matmul(
    xs: Sequence[Float[Array, "..."]],
    kernels: Kernels,
    *,
    transposed: bool = False,
    as_bits: bool = False,
    added: Added = NOTHING,
) -> tuple[Float[Array, "*R C"], dict[int, Array]]:
    """Returns the sum of the products of each input with its kernel, and the inputs after an
    addition.

    The arguments are those of `block_products.summed_matmul` and
    `block_products.summed_matmul_after_adding`; `as_bits` is ignored.

    Returns:
      The sum of the products [*rows, C], and for each index in `added` the sum of that input and
        the array added to it.
    """
    sums = {i: (xs[i].astype(jnp.float32) + x).astype(x.dtype) for i, x in added.items()}
    total = jnp.zeros(())
    for i, (x, kernel) in enumerate(zip(xs, kernels, strict=True)):
        inputs = kernel.ndim - 1
        theirs = tuple(range(1, kernel.ndim) if transposed else range(inputs))
        own, wide = tuple(range(x.ndim - inputs, x.ndim)), sums.get(i, x).astype(jnp.float32)
        total += jnp.tensordot(wide, kernel, axes=(own, theirs))
    return total.astype(xs[0].dtype), sums
