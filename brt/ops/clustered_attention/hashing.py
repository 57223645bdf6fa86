"""Locality-sensitive hashing: bit p of a code says on which side of plane p the vector lies."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Planes(NamedTuple):
    """Random planes, shared by all heads and examples.

    A plane has the points x with x . normal = offset.
    """

    normals: Float[Array, "P K"]
    offsets: Float[Array, " P"]


def random_planes(key: jax.Array, *, bits: int, width: int, offsets: bool) -> Planes:
    numbers = jax.random.normal(key, (bits, width + 1))
    return Planes(numbers[:, :-1], numbers[:, -1] * offsets)


def hash_codes(x: Float[Array, "*B K"], planes: Planes) -> Float[Array, "*B P"]:
    """Returns float32 codes.

    A bit is +1 if the product of x and the plane's normal exceeds the plane's offset, otherwise -1.
    """
    projected = jnp.einsum(
        "...k,pk->...p", x.astype(jnp.float32), planes.normals, precision=jax.lax.Precision.HIGHEST
    )
    beyond = projected > planes.offsets.reshape((1,) * (x.ndim - 1) + (-1,))
    return jnp.where(beyond, 1.0, -1.0)


def unit_scale(x: Float[Array, "B H T K"], valid: Bool[Array, "B T"]) -> Float[Array, "B H T K"]:
    """Returns x in float32, divided by the root mean square of each head's valid vectors.

    The offsets of planes are about 1. Without the scaling, the offsets would have no effect on long
    vectors and would give all short vectors the same code.
    """
    x = jnp.where(valid[:, None, :, None], x.astype(jnp.float32), 0)
    numbers = jnp.maximum(jnp.sum(valid, axis=1), 1)[:, None] * x.shape[-1]
    square = jnp.sum(x**2, axis=(2, 3)) / numbers
    scale = jax.lax.rsqrt(jnp.where(square > 0, square, 1.0))
    return x * scale[..., None, None]
