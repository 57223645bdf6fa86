"""The keys and values that the queries of each segment read, and attention to these keys.

A window is the keys and values that the queries of one segment read. O_S is the softmax attention
to a window, and O_R the output of the recurrence over the other segments.

In shapes, B is the number of sources, M of segments, S of keys of a window, H of heads, K of
numbers of a head, and Q of queries that read the same window. Y is the number of shared keys in
`SharedKeys`, and of all keys of a window in the result of `with_shared`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dropout import Dropout
from brt.ops.softmax_attention import attend_by_head


class SharedKeys(NamedTuple):
    """Keys and values that the queries of all segments read in addition to their window.

    Attributes:
      keys, values: the Y keys and values of each source.
      mask: True for usable keys, False for padding.
    """

    keys: Float[Array, "B H Y K"]
    values: Float[Array, "B H Y K"]
    mask: Bool[Array, "B Y"]


class SegmentWindows(NamedTuple):
    """Keys and values that the queries of each segment read (the segment's window).

    A window has S keys, which may be more than the segment has positions.

    Attributes:
      keys, values: the window of each segment. Segments are the first axis, because the recurrence
        scans over segments.
      mask: True for usable keys, False for padding; the output of a query without a usable key is
        zero.
      counts: the number of segments of each source, from 1 to M.
      shared: additional keys that the queries of all segments read; None for no additional keys.
    """

    keys: Float[Array, "M B H S K"]
    values: Float[Array, "M B H S K"]
    mask: Bool[Array, "M B S"]
    counts: Int[Array, " B"]
    shared: SharedKeys | None = None


def with_shared(
    keys: Float[Array, "*B H S K"],
    values: Float[Array, "*B H S K"],
    mask: Bool[Array, "*B S"],
    shared: SharedKeys | None,
    axis: int,
) -> tuple[Float[Array, "*B H Y K"], Float[Array, "*B H Y K"], Bool[Array, "*B Y"]]:
    """Appends shared keys and values to every window.

    Args:
      keys, values, mask: the windows; S is the number of keys of a window.
      shared: the keys and values to append, whose mask is appended to `mask`. With None, keys,
        values and mask are returned unchanged.
      axis: the axis of keys, values and mask that has the windows of a source.

    Returns:
      The keys, values and mask of the longer windows.
    """
    if shared is None:
        return keys, values, mask

    def append_shared(window_part: Array, shared_part: Array, keys_axis: int) -> Array:
        """Returns the keys, the values or the mask of all windows, with the shared keys, values or
        mask appended to each window.

        Args:
          window_part: the keys, the values or the mask of the windows.
          shared_part: the same field of `shared`, without an axis of windows.
          keys_axis: the axis of the keys of a window, counted from the end.
        """
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
    """Returns O_S, the softmax attention of queries to their window, in the dtype of `values`.

    The output of a query without a usable key is zero.

    Args:
      queries: the Q queries of each window, already multiplied by any scale.
      keys, values: keys and values of the windows.
      mask: True for usable keys, for all queries of a window or for each query.
      dropout: dropout of the softmax weights; None for no dropout.
      lanes: the axis of `queries` that has the rows of the batch. Dropout draws separate random
        numbers for each row.
    """
    factors = None
    if dropout is not None:
        shape = list((*queries.shape[:-1], keys.shape[-2]))
        shape.insert(0, shape.pop(lanes))
        factors = jnp.moveaxis(dropout.factors(tuple(shape), values.dtype), 0, lanes)
    y = attend_by_head(queries, keys, values, mask, factors, null_keys=False)
    some = jnp.any(mask, axis=-1, keepdims=True)
    some = some[..., None, :, :] if mask.ndim == queries.ndim - 1 else some[..., None, None, :]
    return jnp.where(some, y, 0)


def combine_outputs(
    attended: Float[Array, "*B"] | None, recurrent: Float[Array, "*B"] | None, sigma: Array | None
) -> Float[Array, "*B"]:
    """Returns the sum of `attended` (O_S) and `recurrent` (O_R); if one of them is None, returns
    the other.

    `sigma` is a learned scalar or None. If both outputs exist and `sigma` is a scalar, O_S is
    multiplied by sigma and O_R by 1 - sigma.
    """
    if attended is None or recurrent is None:
        return next(x for x in (attended, recurrent) if x is not None)
    if sigma is None:
        return attended + recurrent
    sigma = sigma.astype(attended.dtype)
    return sigma * attended + (1 - sigma) * recurrent
