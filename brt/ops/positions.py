"""T5 relative position bias (Raffel et al. 2020), causal form."""

import math

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


def relative_bias(
    table: Float[Array, "H R"], *, window: int, attend_to_self: bool, max_distance: int
) -> Float[Array, "H W"]:
    """Bias of each head for the `window` keys that a token sees, nearest first.

    Column j belongs to distance j, or j + 1 where a token does not see itself.
    """
    distances = np.arange(window) + (0 if attend_to_self else 1)
    buckets = t5_buckets(distances, buckets=table.shape[1], max_distance=max_distance)
    return jnp.take(table, buckets, axis=1)
