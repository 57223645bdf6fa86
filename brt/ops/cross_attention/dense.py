"""The form "dense" of cross-attention to segments: every query is multiplied with all windows.

The windows of all segments other than the query's own are masked. This is as much work as full
attention. Kernels can compute it without copies of windows. In shapes, M is the number of segments,
and S the number of keys of a window.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops import masked_attention
from brt.ops.cross_attention.recurrence import RecurrentStates, recurrence
from brt.ops.cross_attention.windows import Source, attend_to_window, combine_outputs
from brt.ops.dropout import Dropout


def read_states(
    queries: Float[Array, "B T H K"],
    states: Float[Array, "M B H K K"],
    segment: Int[Array, "B T"],
) -> Float[Array, "B T H K"]:
    """Returns the product of each query and the state of its segment."""
    count, batch, heads, width = states.shape[:4]
    # `masked_queries` [B, H, T, M, K] has a copy of every query for each segment. The copy is zero
    # unless the query belongs to the segment. In one product with the states of all segments, a
    # query therefore reads only the state of its segment.
    is_own = segment[:, None, :, None] == jnp.arange(count)[None, None, None]
    by_head = queries.swapaxes(1, 2)
    masked_queries = jnp.where(is_own[..., None], by_head[:, :, :, None], 0)
    states = jnp.moveaxis(states, 0, 2).reshape(batch, heads, count * width, width)
    flat = masked_queries.reshape(batch, heads, -1, count * width)
    return jnp.matmul(flat, states).swapaxes(1, 2)


class SegmentKernels(NamedTuple):
    """Kernels of the recurrence, and of the form "dense" besides those of masked attention."""

    read_states: Callable[..., Array] = read_states
    unit: int = 1  # The numbers of queries and of keys must be multiples of this number.
    max_queries: int | None = None  # the largest number of queries of a source; None for any
    recur: Callable[..., RecurrentStates] = recurrence

    def support(self, queries: int, keys: int) -> bool:
        fits = self.max_queries is None or queries <= self.max_queries
        return fits and queries % self.unit == 0 and keys % self.unit == 0


def attend_densely(
    queries: Float[Array, "B T H K"],
    source: Source,
    own: Int[Array, "B T"],
    dropout: Dropout | None,
    kernels: SegmentKernels | None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every query; `own` has the segment of each query.

    If `kernels` is None, plain XLA is used.
    """
    windows, recurrence = source.windows, source.recurrence
    if kernels is not None and windows.shared is None:
        return _attend_by_kernels(queries, source, own, dropout, kernels)
    batch, length, heads, width = queries.shape
    count, size = windows.keys.shape[0], windows.keys.shape[3]
    by_head = queries.swapaxes(1, 2)
    # The axes of `is_own` are [B, T, M].
    is_own = own[:, :, None] == jnp.arange(count)[None, None]
    attended = recurrent = scale = None
    if source.use_segment:
        keys, values = (
            jnp.moveaxis(x, 0, 2).reshape(batch, heads, -1, width)
            for x in (windows.keys, windows.values)
        )
        mask = is_own[:, :, :, None] & jnp.moveaxis(windows.mask, 0, 1)[:, None]
        mask = mask.reshape(batch, length, count * size)
        if windows.shared is not None:
            keys = jnp.concatenate([keys, windows.shared.keys], axis=2)
            values = jnp.concatenate([values, windows.shared.values], axis=2)
            shared = windows.shared.mask[:, None]
            shared = jnp.broadcast_to(shared, (batch, length, shared.shape[-1]))
            mask = jnp.concatenate([mask, shared], axis=2)
        attended = attend_to_window(by_head, keys, values, mask, dropout)
    if recurrence is not None:
        recurrent = read_states(queries, recurrence.states, own).swapaxes(1, 2)
        scale = recurrence.scale
    return combine_outputs(attended, recurrent, scale, source.sigma).swapaxes(1, 2)


def _attend_by_kernels(
    queries: Float[Array, "B T H K"],
    source: Source,
    own: Int[Array, "B T"],
    dropout: Dropout | None,
    kernels: SegmentKernels,
) -> Float[Array, "B T H K"]:
    # The kernels read all arrays in the layout that the projections write.
    batch, _, heads, width = queries.shape
    windows, recurrence = source.windows, source.recurrence
    attended = recurrent = scale = None
    if source.use_segment:
        keys, values = (
            x.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)
            for x in (windows.keys, windows.values)
        )
        count, _, size = windows.mask.shape
        mask = jnp.moveaxis(windows.mask, 0, 1).reshape(batch, 1, -1)
        if count > 1:
            mask &= own[:, :, None] == jnp.arange(count * size)[None, None] // size
        attended = masked_attention.attend(queries, keys, values, None, mask, dropout)
    if recurrence is not None:
        recurrent = kernels.read_states(queries, recurrence.states, own)
        scale = None if recurrence.scale is None else recurrence.scale.swapaxes(1, 2)
    return combine_outputs(attended, recurrent, scale, source.sigma)
