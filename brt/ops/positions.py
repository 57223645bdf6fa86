"""Relative positions of keys and queries: T5 buckets, ALiBi and rotary embeddings.

In shapes, K is the number of channels of a head, R of buckets or of pairs of channels, and W of
keys that a token sees.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops import dispatch


def t5_buckets(distances: np.ndarray, *, buckets: int, max_distance: int) -> np.ndarray:
    """Returns the index of T5's bucket for each distance between a query and an earlier key, int32.

    A bucket is a range of distances that share a bias. Each of the first half of the buckets holds
    one distance. The ranges of the second half grow logarithmically up to `max_distance`, and all
    larger distances share the last bucket. Negative distances count as 0.
    """
    exact = buckets // 2
    distances = np.maximum(distances, 0)
    # The original code of the block-recurrent transformer computes the logarithm in float32. In
    # float64, some buckets would begin at other distances.
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
    """Returns T5's causal bias (Raffel et al. 2020) of the keys that a token sees, nearest first.

    The nearest key is the token itself if `attend_to_self`. `t5_buckets` explains `max_distance`.
    """
    distances = _distances(window, attend_to_self)
    buckets = t5_buckets(distances, buckets=table.shape[1], max_distance=max_distance)
    # The mode "clip" saves the code that checks indices; all indices are in range anyway.
    return jnp.take(table, buckets, axis=1, mode="clip")


def alibi_bias(
    scale: Float[Array, ""],
    bound: Float[Array, " 1"],
    *,
    heads: int,
    window: int,
    attend_to_self: bool,
) -> Float[Array, "H W"]:
    """Returns the bias of ALiBi (Press et al. 2022) in the order of `relative_bias`.

    The learned `scale` multiplies the fixed slopes of all heads; no bias is below the learned
    -|bound|.
    """
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    falling = -np.outer(slopes, _distances(window, attend_to_self)).astype(np.float32)
    return jnp.maximum(falling * jnp.abs(scale), -jnp.abs(bound[0]))


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which rotary embeddings rotate R pairs of channels.

    The axis B exists only if the positions differ between the rows of a batch.
    """

    cosines: Float[Array | np.ndarray, "*B T R"]
    sines: Float[Array | np.ndarray, "*B T R"]


class RotarySpeeds(NamedTuple):
    """The angles in radians by which rotary embeddings rotate a head's pairs of channels per token.

    They are a tuple, so that equal angles compare as equal as a static argument of a program.
    """

    radians: tuple[float, ...]


def rotary_speeds(
    size: int, *, base: float = 10_000.0, times_pi: bool = False, scaling: str = "none",
    factor: float = 1.0, low_frequency: float = 1.0, high_frequency: float = 4.0,
    original_length: int = 8192,
) -> RotarySpeeds:  # fmt: skip
    """Returns the angles per token of rotary embeddings, for heads with `size` channels.

    Without scaling, pair i of R = size / 2 pairs rotates by base ** (-i / R) radians (Su et al.
    2021).

    Args:
      scaling: "none"; "linear", which divides all angles by `factor`; or "llama3" (as in Hugging
        Face's transformers), which divides the angles of slow pairs, leaves fast pairs as they are,
        and interpolates between them.
      low_frequency, high_frequency: the numbers of turns within `original_length` tokens up to
        which a pair is slow, and from which on it is fast, in "llama3".
    """
    speeds = base ** (-np.arange(size // 2) / (size // 2))
    # The pretrained decoders of Hugging Face were trained with speeds that are rounded to float32.
    # The original code of the block-recurrent transformer, which multiplies by pi, uses float64.
    speeds = np.pi * speeds if times_pi else speeds.astype(np.float32).astype(np.float64)
    if scaling == "linear":
        speeds = speeds / factor
    if scaling == "llama3":
        turns = original_length * speeds / (2 * np.pi)
        kept = np.clip((turns - low_frequency) / (high_frequency - low_frequency), 0.0, 1.0)
        speeds = kept * speeds + (1 - kept) * speeds / factor
    return RotarySpeeds(tuple(speeds.tolist()))


def rotations(first: int, count: int, speeds: RotarySpeeds) -> Rotation:
    """Returns the cosines and sines of `count` positions from `first` on, which may be negative."""
    # The angles of a long segment are thousands of turns. float32 would be too coarse for them.
    angles = np.outer(np.arange(first, first + count), np.asarray(speeds.radians, np.float64))
    return Rotation(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def rotate(x: Float[Array, "B T H K"], rotation: Rotation) -> Float[Array, "B T H K"]:
    """Returns x, with each pair of channels (i, i + K / 2) rotated by the angle of its position.

    The dot product of a rotated query and a rotated key depends on their positions only through the
    distance.
    """
    cosines, sines = (
        jnp.expand_dims(jnp.concatenate([part, part], axis=-1), -2)
        for part in map(jnp.asarray, rotation)
    )
    if cosines.ndim < x.ndim:
        cosines, sines = cosines[None], sines[None]
    whole = x.astype(jnp.float32) * cosines + _quarter_turn(x).astype(jnp.float32) * sines
    return whole.astype(x.dtype)


# The custom gradient hides the product from rematerialization, which would otherwise store it.
@jax.custom_vjp
def _quarter_turn(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Returns x, with each pair of channels (a, b) = (x_i, x_(i + K / 2)) replaced by (-b, a)."""
    half = x.shape[-1] // 2
    if dispatch.policy().turns_by_product:
        # For finite numbers, the product is exact in every dtype: each result is one channel times
        # 1 or -1.
        turn = np.eye(2 * half, k=half) - np.eye(2 * half, k=-half)
        return jnp.matmul(x, jnp.asarray(turn, x.dtype), precision=jax.lax.Precision.HIGHEST)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


# The inverse of a quarter turn is its negative, because two quarter turns change all signs.
_quarter_turn.defvjp(lambda x: (_quarter_turn(x), None), lambda _, dy: (-_quarter_turn(dy),))


def take_positions(rotation: Rotation, places: Int[Array, "*P"]) -> Rotation:
    """Returns the rotations of the positions `places`, from a table whose row p is position p."""
    return Rotation(*(jnp.take(jnp.asarray(part), places, axis=0) for part in rotation))
