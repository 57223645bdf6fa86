"""How far a key lies before its query: T5 buckets, ALiBi, and rotation."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def t5_buckets(distances: np.ndarray, *, buckets: int, max_distance: int) -> np.ndarray:
    """Bucket of each distance (how far a key lies before its query, >= 0).

    The first half of the buckets holds one distance each, the second half grows
    logarithmically up to `max_distance`; everything beyond shares the last bucket.
    """
    exact = buckets // 2
    distances = np.maximum(distances, 0)
    # float32 like the original: a float64 logarithm moves some bucket borders.
    ratio = np.log(
        distances.astype(np.float32) / np.float32(exact) + np.finfo(np.float32).eps
    ) / np.float32(math.log(max_distance / exact))
    far = exact + (ratio * np.float32(buckets - exact)).astype(np.int32)
    return np.where(distances < exact, distances, np.minimum(far, buckets - 1)).astype(np.int32)


def _distances(window: int, attend_to_self: bool) -> np.ndarray:
    """Of the keys that a token sees, nearest first."""
    return np.arange(window) + (0 if attend_to_self else 1)


def relative_bias(
    table: Float[Array, "H R"], *, window: int, attend_to_self: bool, max_distance: int
) -> Float[Array, "H W"]:
    """T5's bias (Raffel et al. 2020), causal, of the `window` keys that a token sees.

    Column j belongs to distance j, or j + 1 where a token does not see itself.
    """
    distances = _distances(window, attend_to_self)
    buckets = t5_buckets(distances, buckets=table.shape[1], max_distance=max_distance)
    return jnp.take(table, buckets, axis=1, mode="clip")  # none is beyond, which is not looked for


def alibi_bias(
    scale: Float[Array, ""],
    bound: Float[Array, " 1"],
    *,
    heads: int,
    window: int,
    attend_to_self: bool,
) -> Float[Array, "H W"]:
    """ALiBi (Press et al. 2022): a slope per head, here with a learned scale and lower bound.

    Columns as of `relative_bias`. Only the magnitudes of `scale` and `bound` count.
    """
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    falling = -np.outer(slopes, _distances(window, attend_to_self)).astype(np.float32)
    return jnp.maximum(falling * jnp.abs(scale), -jnp.abs(bound[0]))


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which pairs of channels turn; T positions."""

    cosines: Float[Array | np.ndarray, "T R"]
    sines: Float[Array | np.ndarray, "T R"]


def rotations(first: int, count: int, size: int) -> Rotation:
    """Of positions first, first + 1, ... for heads of `size` channels (even).

    The fastest pair makes half a turn a token, the others down to 1 / 10000 of it
    (the original's wavelengths; Su et al. 2021 turn pi times more slowly).
    """
    speeds = 10_000.0 ** (-np.arange(size // 2) / (size // 2))
    # float64: angles of a long segment are thousands of turns.
    angles = np.pi * np.outer(np.arange(first, first + count), speeds)
    return Rotation(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def rotate(x: Float[Array, "B T H K"], rotation: Rotation) -> Float[Array, "B T H K"]:
    """Turns channels i and i + K / 2 together; products depend on the distance alone."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = (jnp.asarray(part)[None, :, None] for part in rotation)
    turned = (first * cosines - second * sines, first * sines + second * cosines)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
