"""Which segment of its source a target position reads, in integers only (section 3.4).

    B  sources        T  target positions     N  beams of a source
    H  heads          K  size of a head       X  source positions, padded
    M  segments       S  source positions of one segment (M * S >= X)

t * (m / q) in float32 picks another segment than t * m / q in every fortieth case.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from brt.config import CrossAttention


class Pace(NamedTuple):
    """How target positions pass the segments; known when tracing.

    Attributes:
      positions: target positions that pass all segments, or each one.
      spread: whether it is all of them.
    """

    positions: int
    spread: bool

    def start(self, segment: Array | int, count: Array | int) -> Array | int:
        """The first target position that reads a segment, or a later one, of so many."""
        if self.spread:
            return -(-segment * self.positions // count)
        return segment * self.positions

    def longest_stay(self, count: int, end: int) -> int:
        """No segment of so many is read by more of the target positions before `end`."""
        usual = -(-self.positions // count) if self.spread else self.positions
        return min(max(usual, end - int(self.start(count - 1, count))), end)


def pace(config: CrossAttention, target_length: int | None) -> Pace:
    """The pace of a batch of targets, or without their length that of decoding."""
    if config.index_mode == "stride":
        return Pace(config.stride, spread=False)
    if config.index_mode == "batch" and target_length is not None:
        return Pace(target_length, spread=True)
    return Pace(config.q_ref, spread=True)


def segment_counts(
    valid: Bool[Array, "B X"], config: CrossAttention, size: int
) -> Int[Array, " B"]:
    """m_b of each source, at least 1: up to its last valid position, or to the padded end."""
    batch, length = valid.shape
    if config.segment_count == "static":
        return jnp.full((batch,), -(-length // size), jnp.int32)
    ends = jnp.where(valid, jnp.arange(1, length + 1, dtype=jnp.int32)[None], 0)
    return jnp.maximum(-(-jnp.max(ends, axis=1) // size), 1)


def segment_index(
    positions: Int[Array, " T"], counts: Int[Array, " B"], pace: Pace
) -> Int[Array, "B T"]:
    """i_b(t) = min(floor(t m_b / q), m_b - 1), int32; positions count from the decoder's start."""
    positions, counts = positions.astype(jnp.int32)[None], counts.astype(jnp.int32)[:, None]
    if pace.spread:
        positions = jnp.minimum(positions, pace.positions) * counts  # capped: else it overflows
    return jnp.minimum(positions // pace.positions, counts - 1)


def cut(x: Shaped[Array, "B X *R"], size: int) -> Shaped[Array, "M B S *R"]:
    """Segments of a padded source, the last one filled up with zeros."""
    batch, length, *rest = x.shape
    count = -(-length // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(batch, count, size, *rest), 1, 0)
