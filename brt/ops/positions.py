"""Relative positions of keys and queries: T5 buckets, ALiBi and rotary embeddings.

In shapes, K is the number of channels of a head, R the number of buckets or of pairs of channels, O
the number of offsets, and W the number of keys that a token sees. The offset of a key is the key's
position minus the query's.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops import dispatch

_BLOCK = 128  # A large tile is built from blocks of this many queries and keys.


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


def relative_buckets(
    offsets: np.ndarray, *, buckets: int, max_distance: int, both_ways: bool
) -> np.ndarray:
    """Returns the index of the bucket of T5's bias for each offset, int32.

    If `both_ways`, the upper half of the buckets is for keys after the query. In each half, all
    distances from `max_distance` on share the last bucket. If not `both_ways`, all keys after the
    query have the bucket of offset 0.
    """
    if not both_ways:
        return t5_buckets(-offsets, buckets=buckets, max_distance=max_distance)
    half = buckets // 2
    near = t5_buckets(np.abs(offsets), buckets=half, max_distance=max_distance)
    return np.where(offsets > 0, half + near, near).astype(np.int32)


def offset_bias(
    table: Float[Array, "R H"], offsets: np.ndarray, *, max_distance: int, both_ways: bool
) -> Float[Array, "H *N O"]:
    """Returns the bias of each head for each of the `offsets`, an array [O] or [N, O].

    The buckets are those of `relative_buckets`.
    """
    rows = relative_buckets(
        offsets, buckets=table.shape[0], max_distance=max_distance, both_ways=both_ways
    )
    return jnp.moveaxis(jnp.take(table, rows, axis=0), -1, 0)


def bias_tile(
    table: Float[Array, "R H"],
    queries: int,
    keys: int,
    *,
    first: int = 0,
    max_distance: int,
    both_ways: bool,
) -> Float[Array, "H Q S"]:
    """Returns T5's bias between each of Q consecutive queries and each of S consecutive keys.

    The arguments `queries` and `keys` are Q and S. The bias is looked up once for each offset, and
    each row of the tile is a slice of these biases. The gradient is therefore a sum, not a scatter
    of Q x S entries. `first` is the position of key 0 minus the position of query 0.
    """
    bias = partial(offset_bias, table, max_distance=max_distance, both_ways=both_ways)
    if queries % _BLOCK or keys % _BLOCK or queries == _BLOCK:
        return _shifted_rows(lambda offsets: bias(offsets + first), queries, keys)
    # All blocks of _BLOCK queries and keys on one diagonal are equal, so only one block of each
    # diagonal is computed.
    rows, columns = queries // _BLOCK, keys // _BLOCK
    starts = first + _BLOCK * np.arange(1 - rows, columns)
    blocks = _shifted_rows(lambda offsets: bias(starts[:, None] + offsets), _BLOCK, _BLOCK)
    of_row = [blocks[:, rows - 1 - i : rows - 1 - i + columns] for i in range(rows)]
    # The axes of the stack are [H, rows, columns, queries of a block, keys of a block].
    return jnp.stack(of_row, axis=1).swapaxes(2, 3).reshape(-1, queries, keys)


def _shifted_rows(
    bias: Callable[[np.ndarray], Float[Array, "H *N O"]], queries: int, keys: int
) -> Float[Array, "H *N Q S"]:
    """Returns the tile that has, for query i and key j, the `bias` of the offset j - i."""
    period = queries + keys
    # The entry of `row` at index (j - i) mod `period` is the bias of the offset j - i of key j from
    # query i. One entry of `row` belongs to no pair of a query and a key and is never read.
    row = bias((np.arange(period) + queries) % period - queries)
    # `row` is repeated and then cut into one line for each query. The lines are one entry shorter
    # than `row`, so line i + 1 begins one entry earlier in `row` than line i. This is correct,
    # because the offset of a key is one smaller for query i + 1 than for query i.
    lines = jnp.tile(row, queries)[..., : queries * (period - 1)]
    return lines.reshape(*row.shape[:-1], queries, period - 1)[..., :keys]


def bias_row(
    table: Float[Array, "R H"], query: Int[Array, ""], keys: int, *, max_distance: int
) -> Float[Array, "H 1 S"]:
    """Returns the causal bias between one query, known at run time, and the keys 0 to S - 1."""
    row = offset_bias(table, -np.arange(keys), max_distance=max_distance, both_ways=False)
    return jnp.take(row, jnp.clip(query - jnp.arange(keys), 0, keys - 1), axis=1)[:, None]


def alibi_bias(
    scale: Float[Array, ""],
    bound: Float[Array, " 1"],
    *,
    heads: int,
    window: int,
    attend_to_self: bool,
) -> Float[Array, "H W"]:
    """Returns the bias of ALiBi (Press et al. 2022), with keys in the order of `relative_bias`.

    The fixed slopes of all heads are multiplied by the learned |scale|. No bias is below -|bound|,
    where `bound` is learned, too.
    """
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    falling = -np.outer(slopes, _distances(window, attend_to_self)).astype(np.float32)
    return jnp.maximum(falling * jnp.abs(scale), -jnp.abs(bound[0]))


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which rotary embeddings rotate R pairs of channels.

    They are multiplied by `RotarySpeeds.factor`. The axis B exists only if the positions differ
    between the rows of a batch.
    """

    cosines: Float[Array | np.ndarray, "*B T R"]
    sines: Float[Array | np.ndarray, "*B T R"]


class RotarySpeeds(NamedTuple):
    """The angle in radians by which rotary embeddings rotate each pair of channels per token.

    Rotated channels are also multiplied by `factor`. The angles are a tuple, so that a jitted
    function can have them as a static argument.
    """

    radians: tuple[float, ...]
    factor: float = 1.0


def rotary_speeds(
    size: int, *, base: float = 10_000.0, divisors: tuple[float, ...] = (), factor: float = 1.0,
) -> RotarySpeeds:  # fmt: skip
    """Returns the angles per token of rotary embeddings, for heads with `size` rotated channels.

    Pair i of R = size / 2 pairs rotates by base ** (-i / R) radians (Su et al. 2021), divided by
    divisors[i]. If `divisors` has a single number, all pairs are divided by it. If it is empty, no
    pair is divided.
    """
    speeds = base ** (-np.arange(size // 2) / (size // 2))
    # The pretrained decoders of Hugging Face were trained with speeds that are rounded to float32.
    speeds = speeds.astype(np.float32).astype(np.float64)
    return RotarySpeeds(tuple((speeds / np.asarray(divisors or 1.0)).tolist()), factor)


def rotations(first: int, count: int, speeds: RotarySpeeds) -> Rotation:
    """Returns cosines and sines for `count` positions from `first` on. `first` may be negative."""
    # The angles of a long segment are thousands of turns. float32 would be too coarse for them.
    angles = np.outer(np.arange(first, first + count), np.asarray(speeds.radians, np.float64))
    cosines, sines = np.cos(angles) * speeds.factor, np.sin(angles) * speeds.factor
    return Rotation(cosines.astype(np.float32), sines.astype(np.float32))


def rotate(x: Float[Array, "B T H K"], rotation: Rotation) -> Float[Array, "B T H K"]:
    """Returns x with each pair of channels (i, i + R) rotated by the angle of the token's position.

    Channels from 2 R on are not changed. The dot product of a rotated query and a rotated key
    depends on their positions only through the distance.
    """
    size = 2 * rotation.cosines.shape[-1]
    cosines, sines = (
        jnp.expand_dims(jnp.concatenate([part, part], axis=-1), -2)
        for part in map(jnp.asarray, rotation)
    )
    if cosines.ndim < x.ndim:
        cosines, sines = cosines[None], sines[None]
    turned = x[..., :size].astype(jnp.float32) * cosines
    turned += _quarter_turn(x[..., :size]).astype(jnp.float32) * sines
    turned = turned.astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


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
    """Returns the rotations of the positions `places`; row p of `rotation` is for position p."""
    return Rotation(*(jnp.take(jnp.asarray(part), places, axis=0) for part in rotation))
