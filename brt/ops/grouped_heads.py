"""Grouped-query attention, in which several heads of queries share a head of keys and values.

Head g of the keys serves R consecutive heads of queries, g R to g R + R - 1. These are the members
of group g (Ainslie et al. 2023). Keys are never repeated in memory, unless the heads of queries are
sharded over more devices than there are heads of keys.

In shapes, H is the number of heads of queries, G the number of heads of keys and values, and
R = H / G the number of members of a group.
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
from brt.ops.partial_attention import AttentionPart


def by_head_of_group(attend: Callable[..., AttentionPart]) -> Callable[..., AttentionPart]:
    """Returns a function for grouped heads that calls `attend`, a function for ungrouped heads.

    Both functions have the contract of an implementation of `brt.ops.window_attention`. `attend` is
    called once for each of the R members of a group, each time with one head of queries from every
    group. The keys are therefore read R times.
    """

    def attend_by_head_of_group(inputs: Any, **options: Any) -> AttentionPart:
        queries, groups = inputs.queries, inputs.keys.shape[2]
        members, dropout = queries.shape[2] // groups, inputs.dropout
        if members == 1:
            return attend(inputs, **options)

        def member_part(x: Array | None, axis: int, member: int) -> Array | None:
            if x is None:
                return None
            by_group = x.reshape(*x.shape[:axis], groups, members, *x.shape[axis + 1 :])
            return jax.lax.index_in_dim(by_group, member, axis + 1, keepdims=False)

        def member_inputs(n: int) -> Any:
            kept = dropout and dataclasses.replace(dropout, keep=member_part(dropout.keep, 0, n))
            return inputs._replace(
                queries=member_part(queries, 2, n), bias=member_part(inputs.bias, 0, n),
                dropout=kept, scale=member_part(inputs.scale, 0, n),
            )  # fmt: skip

        parts = [attend(member_inputs(n), **options) for n in range(members)]
        output, lse = (jnp.stack(part, axis=3) for part in zip(*parts, strict=True))
        return AttentionPart(output.reshape(queries.shape), lse.reshape(queries.shape[:3]))

    return attend_by_head_of_group


def heads_to_tokens(queries: Float[Array, "B T H K"], groups: int) -> Float[Array, "B TR G K"]:
    """Returns the queries with as many heads as the keys: R heads become R consecutive tokens.

    This suits attention in which the result for a query does not depend on the other queries.
    `tokens_to_heads` restores the order in the results.
    """
    batch, tokens, heads, size = queries.shape
    if heads == groups:
        return queries
    by_group = queries.reshape(batch, tokens, groups, heads // groups, size)
    return by_group.swapaxes(2, 3).reshape(batch, -1, groups, size)


def tokens_to_heads(x: Float[Array, "B TR G *S"], heads: int) -> Float[Array, "B T H *S"]:
    """Returns attention results with H heads and T tokens; the inverse of `heads_to_tokens`."""
    batch, rows, groups = x.shape[:3]
    members = heads // groups
    if members == 1:
        return x
    split = x.reshape(batch, rows // members, members, groups, *x.shape[3:])
    return split.swapaxes(2, 3).reshape(batch, rows // members, heads, *x.shape[3:])


def spread_over_devices(x: Array, heads: int, names: tuple[str | None, ...]) -> Array:
    """Returns keys or values whose heads can be sharded over the same devices as the queries.

    Heads are repeated only if the number of devices does not divide the number of heads of keys.
    `heads` is the number of heads of queries. `names` are the logical names of the axes of x, with
    "heads" for the axis of heads.
    """
    axis = names.index("heads")
    groups, devices = x.shape[axis], rules.shard_count("heads", heads)
    repeats = math.lcm(groups, devices) // groups
    return x if repeats == 1 else rules.constrain(jnp.repeat(x, repeats, axis=axis), *names)


def summed_over_groups(x: Float[Array, "..."], groups: int, axis: int) -> Float[Array, "..."]:
    """Returns the gradients of G = `groups` heads of keys.

    x has H heads on `axis`, and the gradient of a head of keys is the sum over its group's members.
    """
    members = x.shape[axis] // groups
    if members == 1:
        return x
    # The TPU compiler estimates that `jnp.sum` over the axis of members takes three times as long
    # as these additions. The slices have strides, because slices of a reshaped x would need a copy.
    parts = (
        jax.lax.slice_in_dim(x, member, None, stride=members, axis=axis)
        for member in range(members)
    )
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts)).astype(x.dtype)


def local_groups(x: Float[Array, "B T G K"], heads: int, members: int, axis: str) -> Array:
    """Returns the heads of keys or values that the queries of the current device attend to.

    This is for use within `shard_map` over the mesh axis `axis`, if every device has all heads of
    keys, but only `heads` heads of queries. Groups have `members` (R) heads of queries. If the
    device's heads all belong to one group, the result has one head. If not, it has `heads` heads.
    """
    first = jax.lax.axis_index(axis) * heads
    if members % heads == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // members, 1, axis=2)
    return jnp.take(x, (first + jnp.arange(heads)) // members, axis=2)
