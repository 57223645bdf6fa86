"""Softmax attention to all keys: selection of the implementation, and sharding over devices.

In shapes, T and Q are numbers of queries of a row, N is the number of blocks, and S and X are
numbers of keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops import dispatch, layout
from brt.ops.attention import reference
from brt.ops.dispatch import Implementation, Op
from brt.ops.normalization import scaled_unit
from brt.ops.softmax_attention import pallas, xla, xla_cpu


def _by_head_and_block(
    function: Callable[..., Array], swapaxes: Callable[[Array, int, int], Array] = jnp.swapaxes
) -> Callable[..., Array]:
    """Wraps an implementation that expects heads before tokens in queries, and an axis of blocks.

    `swapaxes` swaps the axes of heads and tokens. If `scale` is not None, the wrapper also scales
    queries to the norm `scale`.
    """

    def attend_by_token(
        queries: Array, k: Array, v: Array, cache_mask: Array | None, *, scale: Array | None
    ) -> Array:
        if scale is not None:
            queries = scaled_unit(queries, scale)
        blocked = (len(queries), *k.shape[1:-3], -1, *queries.shape[2:])
        q = swapaxes(queries.reshape(blocked), -3, -2)
        mask = None if cache_mask is None else pallas.key_mask(cache_mask, k)
        y = function(q, k, v, mask)
        return swapaxes(y, -3, -2).reshape(queries.shape)

    return attend_by_token


def _by_definition(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    mask = jnp.ones((len(k), k.shape[-2]), bool) if mask is None else mask
    mask = mask.reshape(len(mask), *(1,) * (k.ndim - 3), -1)
    q, k, v = (x.swapaxes(-3, -2) for x in (q, k, v))
    return reference.attend(q, k, v, None, mask).output.swapaxes(-3, -2)


OP = Op(
    "softmax_attention",
    (
        Implementation("pallas_tpu", pallas.by_slab, pallas.slab_refusal),
        Implementation("pallas_gpu", pallas.by_spans, pallas.spans_refusal),
        Implementation("xla_cpu", _by_head_and_block(xla_cpu.attend, layout.swapaxes_copy)),
        Implementation("xla", _by_head_and_block(xla.attend_by_head)),
        Implementation("pallas_interpret", functools.partial(pallas.by_slab, interpret=True)),
        Implementation("reference", _by_head_and_block(_by_definition)),
    ),
)


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B *N S H K"],
    values: Float[Array, "B *N S H K"],
    *,
    scale: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every query over all keys, with logits q.k.

    If the keys have an axis of N blocks, the T queries of a row are split into N blocks as well,
    and each block of queries attends to one block of keys. `scale` is the norm to which the queries
    of each head are first scaled. Without `scale`, queries are used as the caller passes them.
    """
    k, v = (x.swapaxes(-3, -2) for x in (keys, values))
    return _attend(queries, k, v, None, scale, implementation)


def attend_to_blocks(
    queries: Float[Array, "B Q H K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X K"],
    cache_mask: Bool[Array, " B"],
    *,
    null_keys: bool,
    implementation: str | None = None,
) -> Float[Array, "B Q H K"]:
    """Returns the attention of every query to the X keys of two blocks, the previous block first.

    The queries are already multiplied by any scale. `cache_mask` is True for rows that may read the
    previous block. If `null_keys`, hidden keys stay in the softmax as zero keys with zero values.
    Otherwise, they are left out.
    """
    if null_keys:
        mask: Any = pallas.key_mask(cache_mask, keys)
        seen = mask[:, None, :, None]
        keys, values = (jnp.where(seen, x, 0) for x in (keys, values))
        return _attend(queries, keys, values, None, None, implementation)
    return _attend(queries, keys, values, cache_mask, None, implementation)


def _attend(
    queries: Array, k: Array, v: Array, cache_mask: Array | None, scale: Array | None,
    implementation: str | None,
) -> Array:  # fmt: skip
    def attend_on_device(queries: Array, k: Array, v: Array, cache_mask: Any, scale: Any) -> Array:
        return dispatch.run(OP, implementation, queries, k, v, cache_mask, scale=scale)

    if not rules.partitioned():
        return attend_on_device(queries, k, v, cache_mask, scale)
    by_block = k.ndim > queries.ndim
    tokens, lanes = ("tokens", ("lanes", "blocks")) if by_block else (None, ("lanes",))
    q_partition = rules.partition_spec("lanes", tokens, "heads", None, shape=queries.shape)
    k_partition = rules.partition_spec(*lanes, "heads", None, None, shape=k.shape)
    lane_partition = rules.partition_spec("lanes", shape=queries.shape[:1])
    in_specs = q_partition, k_partition, k_partition, lane_partition, P(q_partition[2])
    attend_on_devices = dispatch.on_devices(attend_on_device, in_specs, q_partition)
    return attend_on_devices(queries, k, v, cache_mask, scale)
