"""Locality-sensitive hashing of vectors by random planes.

A hash code has a bit, +1 or -1, for each plane: the side of the plane on which the vector lies.

In shapes, B is the number of rows of the batch, H of heads, T of queries of a head, K of numbers of
a vector, and P of planes, which is the number of bits of a code; *B stands for any leading axes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Planes(NamedTuple):
    """Random planes, shared by all heads and examples.

    A point x is on the plane if its product with the normal equals the offset.

    Attributes:
      normals: float32 [P, K], the normal vectors.
      offsets: float32 [P]; zeros for planes through the origin.
    """

    normals: Float[Array, "P K"]
    offsets: Float[Array, " P"]


def random_planes(key: jax.Array, *, bits: int, width: int, offsets: bool) -> Planes:
    """Returns random planes for vectors of `width` numbers.

    Args:
      key: the random key.
      bits: the number of planes, which is the number of bits of a code.
      width: the size of a vector.
      offsets: True draws the offsets from the standard normal distribution, like the normals; False
        sets them to zero.
    """
    numbers = jax.random.normal(key, (bits, width + 1))
    return Planes(numbers[:, :-1], numbers[:, -1] * offsets)


def hash_codes(x: Float[Array, "*B K"], planes: Planes) -> Float[Array, "*B P"]:
    """Returns the hash codes of the vectors x, float32, with a bit for each of the planes.

    The bit is +1 if the product of the vector and the plane's normal is greater than the plane's
    offset, and -1 otherwise.
    """
    projected = jnp.einsum(
        "...k,pk->...p", x.astype(jnp.float32), planes.normals, precision=jax.lax.Precision.HIGHEST
    )
    beyond = projected > planes.offsets.reshape((1,) * (x.ndim - 1) + (-1,))
    return jnp.where(beyond, 1.0, -1.0)


def unit_scale(x: Float[Array, "B H T K"], valid: Bool[Array, "B T"]) -> Float[Array, "B H T K"]:
    """Returns x in float32, divided by the root mean square of each head's valid vectors.

    The offsets of the hashing planes are about 1. Without the scaling, the offsets would have no
    effect on long vectors and would give all short vectors the same code.

    Args:
      x: the vectors to hash.
      valid: False for padding, whose vectors become zeros.
    """
    x = jnp.where(valid[:, None, :, None], x.astype(jnp.float32), 0)
    numbers = jnp.maximum(jnp.sum(valid, axis=1), 1)[:, None] * x.shape[-1]
    square = jnp.sum(x**2, axis=(2, 3)) / numbers
    scale = jax.lax.rsqrt(jnp.where(square > 0, square, 1.0))
    return x * scale[..., None, None]
