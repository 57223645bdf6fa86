"""Reference implementation of block products."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp
from jaxtyping import Array, Float

# Kernels, or one array that has them on axis 0; and what is added to some arrays, by their place.
Kernels = Sequence[Float[Array, "..."]] | Float[Array, "P ..."]
Added = Mapping[int, Array]
NOTHING: Added = MappingProxyType({})


def spread(
    x: Float[Array, "*R C"],
    kernels: Kernels,
    *,
    transposed: bool = False,
    relu: bool = False,
    where: Array | None = None,
) -> tuple[Array, ...]:
    """Implements `api.spread`."""
    wide = x.astype(jnp.float32)
    found = [jnp.tensordot(wide, k, axes=(-1, -1 if transposed else 0)) for k in kernels]
    if relu:
        found = [jnp.maximum(y, 0) for y in found]
    if where is not None:
        found = [jnp.where(where > 0, y, 0) for y in found]
    return tuple(y.astype(x.dtype) for y in found)


def gathered(
    xs: Sequence[Float[Array, "..."]],
    kernels: Kernels,
    *,
    transposed: bool = False,
    as_bits: bool = False,
    added: Added = NOTHING,
) -> tuple[Float[Array, "*R C"], dict[int, Array]]:
    """Returns the sum of the products of each array with its kernel, and, for each index in
    `added`, the array after the addition. The arguments are those of `api.gathered`; `as_bits` is
    ignored.
    """
    sums = {i: (xs[i].astype(jnp.float32) + x).astype(x.dtype) for i, x in added.items()}
    total = jnp.zeros(())
    for i, (x, kernel) in enumerate(zip(xs, kernels, strict=True)):
        inputs = kernel.ndim - 1
        theirs = tuple(range(1, kernel.ndim) if transposed else range(inputs))
        own, wide = tuple(range(x.ndim - inputs, x.ndim)), sums.get(i, x).astype(jnp.float32)
        total += jnp.tensordot(wide, kernel, axes=(own, theirs))
    return total.astype(xs[0].dtype), sums
