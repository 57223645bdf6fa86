"""The keys and values that the queries of each segment read (its window), and attention to them.

In shapes, M is the number of segments, S of keys of a window, Q of queries that read it, and Y of
shared keys, or of all keys of a window in the result of `with_shared`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dropout import Dropout
from brt.ops.softmax_attention import attend_by_head


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


def with_shared(
    keys: Float[Array, "*B H S K"],
    values: Float[Array, "*B H S K"],
    mask: Bool[Array, "*B S"],
    shared: SharedKeys | None,
    axis: int,
) -> tuple[Float[Array, "*B H Y K"], Float[Array, "*B H Y K"], Bool[Array, "*B Y"]]:
    """Appends shared keys and values, if any, to every window; windows are on `axis`."""
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

    The mask is for all queries of a window or for each. `lanes` is the axis of `queries` that has
    the rows of the batch, for which dropout draws separate numbers.
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


def combine_outputs(
    attended: Float[Array, "*B"] | None, recurrent: Float[Array, "*B"] | None, sigma: Array | None
) -> Float[Array, "*B"]:
    """Returns sigma * attended + (1 - sigma) * recurrent, or the sum of both without sigma.

    If one of the two is None, the result is the other one.
    """
    if attended is None or recurrent is None:
        return next(x for x in (attended, recurrent) if x is not None)
    if sigma is None:
        return attended + recurrent
    sigma = sigma.astype(attended.dtype)
    return sigma * attended + (1 - sigma) * recurrent
