"""Grouped-query attention, in which several heads of queries share a head of keys and values.

Head g of the keys serves R consecutive heads g R, g R + 1, ... of the queries. These R heads of
queries are called the members of group g (Ainslie et al. 2023). Keys and values are never repeated
in memory, unless the heads of queries are sharded over more devices than there are heads of keys.

In shapes, B is the number of rows of the batch, T of tokens of a segment, H of heads of
queries, G of heads of keys and values, and K of numbers of a head; R = H / G. *S stands for any
other axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.distributed import rules
from brt.ops.dropout import DropoutMask


def by_head_of_group(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes grouped-query attention by calls of `attend`, which needs as
    many heads of keys as of queries.

    The function calls `attend` R times, each time with one head of queries from every group, and
    therefore reads the keys R times.

    Args:
      attend: an implementation of window attention, with the arguments of
        `brt.ops.window_attention.api.window_part`. It returns the output [B, T, G, K] and the
        log-sum-exp [B, T, G] of G heads.
    """

    @functools.wraps(attend)
    def attend_by_head_of_group(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        bias: Array | None, cache_mask: Array, dropout: DropoutMask | None = None,
        *, scale: Array | None = None, **options: Any,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Returns the output [B, T, H, K] and the log-sum-exp [B, T, H] of all heads of queries.

        The arguments `queries`, `bias`, `dropout` and `scale` have H heads; the keys and values
        have G heads.

        Args:
          queries: queries of a segment.
          cached: keys and values of the block of tokens before the segment.
          keys, values: keys and values of the segment.
          bias: the bias of each head and distance between a query and a key, or None.
          cache_mask: True for the blocks that may read the block before them.
          dropout: dropout of the attention weights, or None.
          scale: for each head, the norm that `attend` gives to the queries; None leaves them as
            they are.
          options: the other keyword arguments of `attend`.
        """
        others = cached, keys, values
        groups, members = keys.shape[2], queries.shape[2] // keys.shape[2]
        if members == 1:
            return attend(queries, *others, bias, cache_mask, dropout, scale=scale, **options)

        def member_part(x: Array, axis: int, member: int) -> Array:
            """Returns the part of x that belongs to one member of each group.

            Args:
              x: an array whose axis `axis` has H heads; in the result, this axis has G heads.
              axis: the axis of the heads.
              member: the index of the member in each group, from 0 to R - 1.
            """
            by_group = x.reshape(*x.shape[:axis], groups, members, *x.shape[axis + 1 :])
            return jax.lax.index_in_dim(by_group, member, axis + 1, keepdims=False)

        parts = [
            attend(
                member_part(queries, 2, member), *others,
                None if bias is None else member_part(bias, 0, member),
                cache_mask,
                dropout and dataclasses.replace(dropout, keep=member_part(dropout.keep, 0, member)),
                scale=None if scale is None else member_part(scale, 0, member),
                **options,
            )
            for member in range(members)
        ]  # fmt: skip
        output, lse = (jnp.stack(part, axis=3) for part in zip(*parts, strict=True))
        return output.reshape(queries.shape), lse.reshape(queries.shape[:3])

    return attend_by_head_of_group


def heads_to_tokens(queries: Float[Array, "B T H K"], groups: int) -> Float[Array, "B TR G K"]:
    """Returns the queries with G heads, as many as the keys have, and R times as many tokens.

    The R heads of queries that share a head of keys become R consecutive tokens of one head. An
    attention function that needs as many heads of keys as of queries can then be used, if its
    result for a query does not depend on the other queries. `tokens_to_heads` restores the order of
    heads in the results.

    Args:
      queries: the queries of H = G R heads.
      groups: G, the number of heads of keys.
    """
    batch, tokens, heads, size = queries.shape
    if heads == groups:
        return queries
    by_group = queries.reshape(batch, tokens, groups, heads // groups, size)
    return by_group.swapaxes(2, 3).reshape(batch, -1, groups, size)


def tokens_to_heads(x: Float[Array, "B TR G *S"], heads: int) -> Float[Array, "B T H *S"]:
    """Returns attention results with H heads and T tokens; the inverse of `heads_to_tokens`.

    Args:
      x: the results for the queries that `heads_to_tokens` returned, with G heads and R consecutive
        entries for each token.
      heads: H, the number of heads of queries.
    """
    batch, rows, groups = x.shape[:3]
    members = heads // groups
    if members == 1:
        return x
    split = x.reshape(batch, rows // members, members, groups, *x.shape[3:])
    return split.swapaxes(2, 3).reshape(batch, rows // members, heads, *x.shape[3:])


def spread_over_devices(x: Array, heads: int, names: tuple[str | None, ...]) -> Array:
    """Returns keys or values whose heads can be sharded over the same devices as the heads of
    queries.

    Heads are repeated only if the number of devices does not divide the number of heads of keys.
    Every device then has the keys that its own queries need.

    Args:
      x: keys or values with G heads.
      heads: H, the number of heads of queries, a multiple of G.
      names: the names of the axes of x for sharding; the axis of heads has the name "heads".
    """
    axis = names.index("heads")
    groups, devices = x.shape[axis], rules.shard_count("heads", heads)
    repeats = math.lcm(groups, devices) // groups
    return x if repeats == 1 else rules.constrain(jnp.repeat(x, repeats, axis=axis), *names)


def summed_over_groups(x: Float[Array, "..."], groups: int, axis: int) -> Float[Array, "..."]:
    """Returns the gradients of keys or values for each head of keys.

    The gradient of a head of keys is the sum of the gradients from all heads of queries that share
    this head of keys.

    Args:
      x: the gradients of the keys or values from each head of queries.
      groups: G, the number of heads of keys.
      axis: the axis of x that has H heads; in the result, it has G heads.
    """
    members = x.shape[axis] // groups
    if members == 1:
        return x
    # The TPU compiler estimates that `jnp.sum` over the axis of members takes three times as long
    # as these additions, and it would copy x to slice it after a reshape.
    parts = (
        jax.lax.slice_in_dim(x, member, None, stride=members, axis=axis)
        for member in range(members)
    )
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts)).astype(x.dtype)


def local_groups(x: Float[Array, "B T G K"], heads: int, members: int, axis: str) -> Array:
    """Returns the heads of keys or values that the queries of the current device attend to.

    The function is called within `shard_map`. It is needed if the heads of queries are sharded over
    so many devices that the heads of keys cannot be sharded; every device then has all heads of
    keys. The result has one head if all queries of the device belong to one group, and otherwise
    one head of keys for each head of queries.

    Args:
      x: all heads of keys or values.
      heads: the number of heads of queries on each device.
      members: R, the number of heads of queries that share a head of keys.
      axis: the name of the mesh axis over which the heads of queries are sharded.
    """
    first = jax.lax.axis_index(axis) * heads
    if members % heads == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // members, 1, axis=2)
    return jnp.take(x, (first + jnp.arange(heads)) // members, axis=2)
