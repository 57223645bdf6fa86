"""Relative positions of keys and queries: T5 buckets, ALiBi and rotary embeddings.

In shapes, H is the number of heads, R of buckets or of pairs of channels, and W of keys that a
token sees.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def t5_buckets(distances: np.ndarray, *, buckets: int, max_distance: int) -> np.ndarray:
    """Returns T5's bucket of each distance, int32; a distance is counted from a key to a later
    query.

    Each of the first half of the buckets holds one distance. The ranges of the second half grow
    logarithmically up to `max_distance`, and all larger distances share the last bucket.
    """
    exact = buckets // 2
    distances = np.maximum(distances, 0)
    # The original code computes in float32; a float64 logarithm would change the limits of some
    # buckets.
    ratio = np.log(
        distances.astype(np.float32) / np.float32(exact) + np.finfo(np.float32).eps
    ) / np.float32(math.log(max_distance / exact))
    far = exact + (ratio * np.float32(buckets - exact)).astype(np.int32)
    return np.where(distances < exact, distances, np.minimum(far, buckets - 1)).astype(np.int32)


def _distances(window: int, attend_to_self: bool) -> np.ndarray:
    """Returns the distances of the keys that a token sees, the nearest first."""
    return np.arange(window) + (0 if attend_to_self else 1)


def relative_bias(
    table: Float[Array, "H R"], *, window: int, attend_to_self: bool, max_distance: int
) -> Float[Array, "H W"]:
    """Returns T5's causal bias (Raffel et al. 2020) of the `window` keys that a token sees.

    Column j belongs to the key at distance j, or j + 1 if a token does not see itself.

    Args:
      table: the bias of each of R buckets of distances.
      window: the number of keys that a token sees.
      attend_to_self: True if the nearest key is the token itself.
      max_distance: distances from this number on share the last bucket.
    """
    distances = _distances(window, attend_to_self)
    buckets = t5_buckets(distances, buckets=table.shape[1], max_distance=max_distance)
    # The mode "clip" spares the check of the indices, which are all in range.
    return jnp.take(table, buckets, axis=1, mode="clip")


def alibi_bias(
    scale: Float[Array, ""],
    bound: Float[Array, " 1"],
    *,
    heads: int,
    window: int,
    attend_to_self: bool,
) -> Float[Array, "H W"]:
    """Returns the bias of ALiBi (Press et al. 2022) for the `window` keys that a token sees.

    The bias falls with the distance of the key; each head has its own slope. All slopes are
    multiplied by |scale|, and no bias is below -|bound|; both are learned. Column j belongs to the
    key at distance j, or j + 1 if a token does not see itself.
    """
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    falling = -np.outer(slopes, _distances(window, attend_to_self)).astype(np.float32)
    return jnp.maximum(falling * jnp.abs(scale), -jnp.abs(bound[0]))


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which rotary embeddings turn pairs of channels.

    Both arrays have a row for each of T positions and a column for each of R pairs.
    """

    cosines: Float[Array | np.ndarray, "T R"]
    sines: Float[Array | np.ndarray, "T R"]


def rotations(first: int, count: int, size: int) -> Rotation:
    """Returns the rotary angles of positions first, first + 1, ... for heads of `size` channels.

    There are `count` positions; `size` must be even. The fastest pair makes half a turn per token;
    the slowest pairs approach 1 / 10000 of that. These are the wavelengths of the original code;
    the angles of Su et al. 2021 are smaller by a factor of pi.
    """
    speeds = 10_000.0 ** (-np.arange(size // 2) / (size // 2))
    # The angles of a long segment are thousands of turns. float32 would be too coarse for them.
    angles = np.pi * np.outer(np.arange(first, first + count), speeds)
    return Rotation(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def rotate(x: Float[Array, "B T H K"], rotation: Rotation) -> Float[Array, "B T H K"]:
    """Returns x with channels i and i + K / 2 rotated together by the angle of each position.

    Products of rotated queries and keys depend on their distance alone. The result has x's dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = (jnp.asarray(part)[None, :, None] for part in rotation)
    rotated = (first * cosines - second * sines, first * sines + second * cosines)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
