"""Which segment of the source a target position reads (SRformer, section 3.4).

If q target positions read m segments, position t reads segment t * m / q. The computation uses
integers, because t * (m / q) in float32 gives a wrong segment in about one of forty cases. In
shapes, X is the number of source positions after padding, M the number of segments of S positions,
and Y the number of shared keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from brt.ops.cross_attention.config import CrossConfig


class SharedKeys(NamedTuple):
    """Keys and values that the queries of all segments read in addition to their window."""

    keys: Float[Array, "B H Y K"]
    values: Float[Array, "B H Y K"]
    mask: Bool[Array, "B Y"]  # True for usable keys, False for padding


class SegmentWindows(NamedTuple):
    """The windows of segments; a window may have more keys than its segment has positions.

    Segments are the first axis, because the recurrence scans over them.
    """

    keys: Float[Array, "M B H S K"]
    values: Float[Array, "M B H S K"]
    mask: Bool[Array, "M B S"]  # True for usable keys; a query without one gets zeros
    counts: Int[Array, " B"]  # the number of segments of each source, from 1 to M
    shared: SharedKeys | None = None


def reading_positions(config: CrossConfig, target_length: int | None) -> int:
    """Returns q, the number of target positions that together read all segments of a source.

    `target_length` is None in decoding.
    """
    return target_length if config.counts_padding and target_length else config.q_ref


def first_position(segment: Array | int, count: Array | int, q: int) -> Array | int:
    """Returns the first target position that reads segment number `segment` of `count`.

    `q` is the number of target positions that together read all segments.
    """
    return -(-segment * q // count)


def most_positions(count: int, end: int, q: int) -> int:
    """Returns an upper bound of how many positions before `end` share one of `count` segments."""
    # Position q and all later positions read the last segment, too, so more positions may read the
    # last segment than another one.
    return min(max(-(-q // count), end - int(first_position(count - 1, count, q))), end)


def segment_counts(valid: Bool[Array, "B X"], config: CrossConfig, size: int) -> Int[Array, " B"]:
    """Returns how many segments of `size` positions each source has, at least 1.

    The last segment contains the last valid position. If `config.counts_padding` is True, it
    contains the end of the padding instead.
    """
    batch, length = valid.shape
    if config.counts_padding:
        return jnp.full((batch,), -(-length // size), jnp.int32)
    ends = jnp.where(valid, jnp.arange(1, length + 1, dtype=jnp.int32)[None], 0)
    return jnp.maximum(-(-jnp.max(ends, axis=1) // size), 1)


def segment_index(
    positions: Int[Array, " T"], counts: Int[Array, " B"], q: int
) -> Int[Array, "B T"]:
    """Returns the segment that each target position t reads, of m = `counts` segments.

    The segment is min(floor(t m / q), m - 1), because q positions together read all m segments.
    """
    positions, counts = positions.astype(jnp.int32)[None], counts.astype(jnp.int32)[:, None]
    # The positions are limited before the multiplication, because the product could overflow for
    # large positions. All positions from the limit on read the last segment anyway.
    return jnp.minimum(jnp.minimum(positions, q) * counts // q, counts - 1)


def split_segments(x: Shaped[Array, "B X *R"], size: int) -> Shaped[Array, "M B S *R"]:
    """Divides a source into segments of `size` positions; zeros fill up the last segment."""
    batch, length, *rest = x.shape
    count = -(-length // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(batch, count, size, *rest), 1, 0)
