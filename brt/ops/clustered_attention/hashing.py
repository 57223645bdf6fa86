"""Locality-sensitive hashing by the sides of random planes, as vectors of +1 and -1."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Planes(NamedTuple):
    """Random planes, shared by all heads and examples.

    Attributes:
      normals: float32 [P, K].
      offsets: float32 [P]; zeros: planes through the origin.
    """

    normals: Float[Array, "P K"]
    offsets: Float[Array, " P"]


def random_planes(key: jax.Array, *, bits: int, width: int, offsets: bool) -> Planes:
    """Planes of standard normal numbers."""
    numbers = jax.random.normal(key, (bits, width + 1))
    return Planes(numbers[:, :-1], numbers[:, -1] * offsets)


def hash_codes(x: Float[Array, "*B K"], planes: Planes) -> Float[Array, "*B P"]:
    """+1 where x is strictly beyond the plane, else -1; float32."""
    projected = jnp.einsum(
        "...k,pk->...p", x.astype(jnp.float32), planes.normals, precision=jax.lax.Precision.HIGHEST
    )
    beyond = projected > planes.offsets.reshape((1,) * (x.ndim - 1) + (-1,))
    return jnp.where(beyond, 1.0, -1.0)


def unit_scale(x: Float[Array, "B H T K"], valid: Bool[Array, "B T"]) -> Float[Array, "B H T K"]:
    """x over the root mean square of its valid numbers, head by head; float32.

    The planes' offsets are about 1: they would mean nothing to long vectors, and give short
    ones all the same code.
    """
    x = jnp.where(valid[:, None, :, None], x.astype(jnp.float32), 0)
    numbers = jnp.maximum(jnp.sum(valid, axis=1), 1)[:, None] * x.shape[-1]
    square = jnp.sum(x**2, axis=(2, 3)) / numbers
    scale = jax.lax.rsqrt(jnp.where(square > 0, square, 1.0))
    return x * scale[..., None, None]
