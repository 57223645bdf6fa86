"""The keys and values that the queries of each segment read (its window), and attention to them.

In shapes, M is the number of segments, S the number of keys of a window, and Q the number of
queries that read the window. Y is the number of shared keys, and Z = S + Y the number of keys of a
window and shared keys together.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.cross_attention import baselines
from brt.ops.cross_attention.config import CrossConfig
from brt.ops.cross_attention.parameters import CrossParameters
from brt.ops.cross_attention.recurrence import RecurrentStates
from brt.ops.cross_attention.segments import (
    SegmentWindows,
    SharedKeys,
    segment_counts,
    split_segments,
)
from brt.ops.dropout import Dropout
from brt.ops.softmax_attention import attend_by_head


def build_windows(
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: CrossParameters,
    config: CrossConfig,
) -> SegmentWindows:
    """Returns the window of each segment: the keys and values that its target positions read."""
    if not config.counts_padding:
        keys, values = (jnp.where(valid[:, :, None, None], x, 0) for x in (keys, values))
    size = keys.shape[1] if config.kind == "full" else config.segment_size
    own_keys, own_values = (split_segments(x, size).swapaxes(2, 3) for x in (keys, values))
    mask, counts = split_segments(valid, size), segment_counts(valid, config, size)
    windows = SegmentWindows(own_keys, own_values, mask, counts)
    if config.kind == "local_global":
        counted = jnp.ones_like(mask) if config.counts_padding else mask
        return windows._replace(shared=baselines.segment_means(own_keys, own_values, counted))
    if config.kind not in ("xl_memory", "transformer_xl"):
        return windows
    recurs = config.kind == "xl_memory"
    memories: Any = (None, None)
    if recurs:
        weights = (parameters.memory_keys, parameters.memory_values)
        memories = (
            split_segments(baselines.rnn(x, w), size).swapaxes(2, 3)
            for x, w in zip((keys, values), weights, strict=True)
        )
    k, v = map(baselines.with_previous, (own_keys, own_values), memories)
    return SegmentWindows(k, v, baselines.previous_mask(mask, first=recurs), counts)


def with_shared(
    keys: Float[Array, "*B H S K"],
    values: Float[Array, "*B H S K"],
    mask: Bool[Array, "*B S"],
    shared: SharedKeys | None,
    axis: int,
) -> tuple[Float[Array, "*B H Z K"], Float[Array, "*B H Z K"], Bool[Array, "*B Z"]]:
    """Returns the keys, values and mask of windows, with `shared` appended to each window.

    `axis` is the axis of windows, which the arrays of `shared` do not have.
    """
    if shared is None:
        return keys, values, mask

    def append_shared(window_part: Array, shared_part: Array, keys_axis: int) -> Array:
        shared_part = jnp.expand_dims(shared_part, axis)
        shared_part = jnp.broadcast_to(
            shared_part, (*mask.shape[:-1], *shared_part.shape[mask.ndim - 1 :])
        )
        return jnp.concatenate([window_part, shared_part], axis=keys_axis)

    return (
        append_shared(keys, shared.keys, -2),
        append_shared(values, shared.values, -2),
        append_shared(mask, shared.mask, -1),
    )


def attend_to_window(
    queries: Float[Array, "*B H Q K"],
    keys: Float[Array, "*B H S K"],
    values: Float[Array, "*B H S K"],
    mask: Bool[Array, "*B S"] | Bool[Array, "*B Q S"],
    dropout: Dropout | None = None,
    *,
    lanes: int = 0,
) -> Float[Array, "*B H Q K"]:
    """Returns the softmax attention to windows; zeros for a query without a usable key.

    The mask has no axis of queries if all queries share it. `lanes` is the index of the batch axis
    of `queries`. Dropout draws different random numbers for each row of the batch.
    """
    factors = None
    if dropout is not None:
        shape = list((*queries.shape[:-1], keys.shape[-2]))
        shape.insert(0, shape.pop(lanes))
        factors = jnp.moveaxis(dropout.factors(tuple(shape), values.dtype), 0, lanes)
    y = attend_by_head(queries, keys, values, mask, factors)
    some = jnp.any(mask, axis=-1, keepdims=True)
    some = some[..., None, :, :] if mask.ndim == queries.ndim - 1 else some[..., None, None, :]
    return jnp.where(some, y, 0)


class Source(NamedTuple):
    """What the target positions read of a source."""

    windows: SegmentWindows
    use_segment: bool  # False omits the softmax attention to the windows
    recurrence: RecurrentStates | None = None
    # The weight of the softmax attention. The recurrence has the weight 1 - sigma. None stands for
    # the weight 1 of both.
    sigma: Float[Array, ""] | None = None


def combine_outputs(
    attended: Float[Array, "*B"] | None,
    recurrent: Float[Array, "*B"] | None,
    scale: Float[Array, "..."] | None,
    sigma: Array | None,
) -> Float[Array, "*B"]:
    """Returns sigma * attended + (1 - sigma) * recurrent * scale.

    If `sigma` is None, both have the weight 1. If `scale` is None, the factor 1 takes its place. If
    `attended` is None, the result is recurrent * scale; if `recurrent` is None, it is `attended`.
    """
    if recurrent is not None and scale is not None:
        recurrent = recurrent * scale.astype(recurrent.dtype)
    if attended is None or recurrent is None:
        return next(x for x in (attended, recurrent) if x is not None)
    if sigma is None:
        return attended + recurrent
    sigma = sigma.astype(attended.dtype)
    return sigma * attended + (1 - sigma) * recurrent
