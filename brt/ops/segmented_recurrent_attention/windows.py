"""What queries read, a window of keys for each segment, and how they read it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dropout import Dropout
from brt.ops.softmax_attention import attend_by_head


class Shared(NamedTuple):
    """Keys that the queries of every segment read beside their window."""

    keys: Float[Array, "B H Y K"]
    values: Float[Array, "B H Y K"]
    mask: Bool[Array, "B Y"]


class Windows(NamedTuple):
    """Of each segment the keys that its queries attend to; S may be larger than a segment.

    Attributes:
      keys, values: segments first, so that the recurrence runs over them as they are.
      mask: False on padding; a query without a usable key gets zeros.
      counts: segments of each source, 1 to M.
      shared: or None.
    """

    keys: Float[Array, "M B H S K"]
    values: Float[Array, "M B H S K"]
    mask: Bool[Array, "M B S"]
    counts: Int[Array, " B"]
    shared: Shared | None = None


def with_shared(
    keys: Float[Array, "*B H S K"],
    values: Float[Array, "*B H S K"],
    mask: Bool[Array, "*B S"],
    shared: Shared | None,
    axis: int,
) -> tuple[Float[Array, "*B H Y K"], Float[Array, "*B H Y K"], Bool[Array, "*B Y"]]:
    """The shared keys behind those of every window; `axis` is that of the windows."""
    if shared is None:
        return keys, values, mask

    def joined(own: Array, of_all: Array, behind: int) -> Array:
        of_all = jnp.expand_dims(of_all, axis)
        of_all = jnp.broadcast_to(of_all, (*mask.shape[:-1], *of_all.shape[mask.ndim - 1 :]))
        return jnp.concatenate([own, of_all], axis=behind)

    return (
        joined(keys, shared.keys, -2),
        joined(values, shared.values, -2),
        joined(mask, shared.mask, -1),
    )


def read_window(
    queries: Float[Array, "*B H Q K"],
    keys: Float[Array, "*B H S K"],
    values: Float[Array, "*B H S K"],
    mask: Bool[Array, "*B S"] | Bool[Array, "*B Q S"],
    dropout: Dropout | None = None,
    *,
    lanes: int = 0,
) -> Float[Array, "*B H Q K"]:
    """O_S: softmax attention, zeros where the mask has no True.

    Args:
      dropout: of the softmax weights.
      lanes: the axis of the queries that the lanes of the batch are on; dropout draws by lane.
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


def mixed(
    attended: Float[Array, "*B"] | None, recurrent: Float[Array, "*B"] | None, sigma: Array | None
) -> Float[Array, "*B"]:
    """O of O_S and O_R, of which one may be missing: their sum, or shares sigma and 1 - sigma."""
    if attended is None or recurrent is None:
        return next(x for x in (attended, recurrent) if x is not None)
    if sigma is None:
        return attended + recurrent
    sigma = sigma.astype(attended.dtype)
    return sigma * attended + (1 - sigma) * recurrent
