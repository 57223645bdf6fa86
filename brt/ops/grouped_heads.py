"""Attention of grouped queries, in which several heads of queries share a head of keys and values.

In shapes, H is the number of heads of queries, and G the number of heads of keys and values
(Ainslie et al. 2023). Head g of the keys serves the R = H / G consecutive heads g R, g R + 1, ...
of the queries. Keys and values are never repeated in memory.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.normalization import inverse_norms
from brt.ops.partial_attention import AttentionPart


def step_logits(
    query: Float[Array, "B H K"], keys: Float[Array, "B S G K"], *, normalize_keys: bool = False
) -> Float[Array, "B H S"]:
    """Returns the float32 dot products of one query per head with S keys.

    Args:
      query: the query of each head of queries.
      keys: the keys of each head of keys.
      normalize_keys: True divides each product by the norm of its key. The result is the product
        with the normalized key, and no normalized copy of all keys is written.
    """
    batch, heads, size = query.shape
    slots, groups = keys.shape[1:3]
    grouped = query.reshape(batch, groups, heads // groups, size)
    logits = jnp.einsum("bgrk,bsgk->bgrs", grouped, keys, preferred_element_type=jnp.float32)
    if normalize_keys:
        logits *= inverse_norms(keys).swapaxes(1, 2)[:, :, None]
    return logits.reshape(batch, heads, slots)


def weighted_values(
    weights: Float[Array, "B H S"], values: Float[Array, "B S G K"]
) -> Float[Array, "B H K"]:
    """Returns the sum of S values, weighted by the attention weights of one query per head, in the
    dtype of `values`.

    Head g of the values serves H / G consecutive heads of the weights.
    """
    batch, heads, slots = weights.shape
    grouped = weights.astype(values.dtype).reshape(batch, values.shape[2], -1, slots)
    output = jnp.einsum("bgrs,bsgk->bgrk", grouped, values)
    return output.reshape(batch, heads, values.shape[3])


def by_member(
    attend: Callable[[Array, Array | None, Array | None, int], AttentionPart],
    queries: Float[Array, "B T H K"],
    groups: int,
    bias: Float[Array, "H W"] | None,
    scale: Float[Array, " H"] | None,
) -> AttentionPart:
    """Returns the attention of grouped queries, computed by an operation that needs equally many
    heads of queries and of keys.

    A group is the R = H / G heads of queries that share a head of keys. `attend` is called R times,
    each time for one member of every group. It therefore reads the keys R times.

    Args:
      attend: (queries [B, T, G, K], bias [G, W], scale [G], index of the member) -> the attention
        of these heads.
      queries: the queries of all heads.
      groups: G, the number of heads of keys.
      bias: the position bias of all heads, or None.
      scale: the length of the normalized queries of all heads, or None.
    """
    if queries.shape[2] == groups:
        return attend(queries, bias, scale, 0)

    def split(x: Array, axis: int) -> Array:
        """Returns x with the axis of heads split into groups and their members."""
        return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])

    # Members are not taken by slices with a stride: XLA computes a wrong gradient of such a slice
    # of an axis that is sharded over devices (jax 0.10.2).
    by_group = split(queries, 2)
    parts = [
        attend(
            by_group[:, :, :, member],
            None if bias is None else split(bias, 0)[:, member],
            None if scale is None else split(scale, 0)[:, member],
            member,
        )
        for member in range(by_group.shape[3])
    ]
    output = jnp.stack([part.output for part in parts], axis=3)
    lse = jnp.stack([part.lse for part in parts], axis=3)
    return AttentionPart(output.reshape(queries.shape), lse.reshape(queries.shape[:3]))
