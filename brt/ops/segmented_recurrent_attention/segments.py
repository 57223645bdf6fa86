"""Functions that compute which segment of the source a target position reads (SRformer, section
3.4).

In shapes, B is the number of sources, X of source positions after padding, M of segments, S of
source positions of a segment (M * S >= X), T of target positions, N of beams of a source, H of
heads, and K of numbers of a head.

If q target positions read m segments, position t reads segment t * m / q. The computation uses
integers, because t * (m / q) in float32 gives a wrong segment in about one of forty cases.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from brt.ops.segmented_recurrent_attention.config import CrossConfig


class SegmentSchedule(NamedTuple):
    """The rule by which target positions are distributed over the segments of a source, known at
    trace time.

    Attributes:
      positions: if `shared_by_segments` is True, the number of target positions that together read
        all segments of a source; otherwise, the number of target positions that read each segment.
      shared_by_segments: True divides `positions` evenly among the segments of a source.
    """

    positions: int
    shared_by_segments: bool

    def first_position(self, segment: Array | int, count: Array | int) -> Array | int:
        """Returns the first target position that reads a segment.

        Args:
          segment: the index of the segment.
          count: the number of segments of the source.
        """
        if self.shared_by_segments:
            return -(-segment * self.positions // count)
        return segment * self.positions

    def most_positions(self, count: int, end: int) -> int:
        """Returns an upper bound of the number of target positions that read the same segment.

        The last segment can have more target positions than the others, because all positions after
        the last regular one read it, too.

        Args:
          count: the number of segments of the source.
          end: the end of the target; only positions before `end` are counted.
        """
        usual = -(-self.positions // count) if self.shared_by_segments else self.positions
        return min(max(usual, end - int(self.first_position(count - 1, count))), end)


def segment_schedule(config: CrossConfig, target_length: int | None) -> SegmentSchedule:
    """Returns the rule by which target positions read segments, as `config.index_mode` selects it.

    `target_length` is the number of positions to which the targets of a batch are padded. It is
    None in decoding, where `config.q_ref` takes its place.
    """
    if config.index_mode == "stride":
        return SegmentSchedule(config.stride, shared_by_segments=False)
    if config.index_mode == "batch" and target_length is not None:
        return SegmentSchedule(target_length, shared_by_segments=True)
    return SegmentSchedule(config.q_ref, shared_by_segments=True)


def segment_counts(valid: Bool[Array, "B X"], config: CrossConfig, size: int) -> Int[Array, " B"]:
    """Returns the number of segments of each source, int32, at least 1.

    Args:
      valid: False for padding.
      config: settings of cross-attention. With `segment_count = "static"`, the segments extend to
        the end of the padded source, and otherwise to the last valid position.
      size: the number of positions of a segment.
    """
    batch, length = valid.shape
    if config.segment_count == "static":
        return jnp.full((batch,), -(-length // size), jnp.int32)
    ends = jnp.where(valid, jnp.arange(1, length + 1, dtype=jnp.int32)[None], 0)
    return jnp.maximum(-(-jnp.max(ends, axis=1) // size), 1)


def segment_index(
    positions: Int[Array, " T"], counts: Int[Array, " B"], schedule: SegmentSchedule
) -> Int[Array, "B T"]:
    """Returns the index of the segment that each target position reads, int32.

    If q positions together read all m segments of a source, position t reads segment
    min(floor(t m / q), m - 1). If p positions read each segment, position t reads segment
    min(floor(t / p), m - 1).

    Args:
      positions: target positions t, counted from the start of the target.
      counts: m, the number of segments of each source.
      schedule: the rule with the number q (`shared_by_segments` is True) or p of target positions.
    """
    positions, counts = positions.astype(jnp.int32)[None], counts.astype(jnp.int32)[:, None]
    if schedule.shared_by_segments:
        # The positions are limited before the multiplication, because the product could overflow
        # for large positions. All positions from the limit on read the last segment anyway.
        positions = jnp.minimum(positions, schedule.positions) * counts
    return jnp.minimum(positions // schedule.positions, counts - 1)


def split_segments(x: Shaped[Array, "B X *R"], size: int) -> Shaped[Array, "M B S *R"]:
    """Returns a source divided into segments of `size` positions.

    The last segment is filled up with zeros.

    `x` has the sources on axis 0 and their X positions on axis 1; *R stands for any further axes,
    such as H and K. In the result, the segments are on axis 0.
    """
    batch, length, *rest = x.shape
    count = -(-length // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(batch, count, size, *rest), 1, 0)
