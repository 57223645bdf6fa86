"""Runs a kernel of masked attention on each device, for the device's rows and heads.

The first of the leading axes *B is sharded. T is the number of queries, and S of keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops import dispatch, dropout_hash
from brt.ops.dropout import Dropout
from brt.ops.partial_attention import AttentionPart


def dropout_refusal(queries: Array, dropout: Any) -> str | None:
    """Returns the reason why kernels have no dropout for these queries, or None if they have it."""
    if dropout is None or not rules.partitioned():
        return None
    if rules.shard_count("heads", queries.shape[-2]) > 1 or queries.ndim != 4:
        return "has no dropout if heads are sharded, or if there are several leading axes"
    return None


def attend_on_devices(
    kernel: Callable[..., tuple[Array, Array]],
    queries: Float[Array, "*B T H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H T S"] | None,
    mask: Bool[Array, "*#B #T S"],
    dropout: Dropout | None,
) -> AttentionPart:
    """Computes `attend_part` by a kernel, which returns the output and log-sum-exp of one device.

    The kernel gets the device's parts of the arguments, the keys of `dropout_hash.query_keys` in
    the place of `dropout`, and the keyword argument `rate`.
    """
    mask = jnp.broadcast_to(mask, (*queries.shape[:-3], *mask.shape[-2:]))
    rate, random_keys = 0.0, None
    if dropout is not None:
        rate, random_keys = dropout.rate, dropout_hash.query_keys(dropout, queries.shape[-3])
    local = functools.partial(kernel, rate=rate)
    if not rules.partitioned() or queries.ndim == 3:
        return AttentionPart(*local(queries, keys, values, bias, mask, random_keys))
    lead = "lanes", *[None] * (queries.ndim - 4)
    by_head = rules.partition_spec(*lead, None, "heads", None, shape=queries.shape)
    by_lane = P(*by_head[: queries.ndim - 3])
    in_specs = by_head, by_head, by_head, P(by_head[-2]), by_lane, P()
    local = dispatch.on_devices(local, in_specs, (by_head, P(*by_head[:-1])))
    return AttentionPart(*local(queries, keys, values, bias, mask, random_keys))
