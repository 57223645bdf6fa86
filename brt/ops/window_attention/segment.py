"""Window attention over several devices, sharded by rows of the batch, heads and blocks.

Each device computes the attention of its own tokens in `shard_map`, because XLA's partitioner
cannot split a kernel. If the blocks of a segment are sharded, a device also reads the last W keys
and values of the device that has the tokens before its own; the first device reads the cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.grouped_heads import local_groups
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention.api import local_part, window_part

_SEQUENCE_AXIS, _HEADS_AXIS = "sequence", "tensor"


def segment_part(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: DropoutMask | None = None,
    *,
    attend_to_self: bool = True,
    null_keys: bool = False,
    scale: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> AttentionPart:
    """Computes `api.window_part` of tokens that may be sharded over devices."""

    def attend(*inputs: Any) -> AttentionPart:
        *others, scale = inputs
        return window_part(
            *others, attend_to_self=attend_to_self, null_keys=null_keys, scale=scale,
            implementation=implementation,
        )  # fmt: skip

    inputs = queries, cached, keys, values, bias, cache_mask, dropout, scale
    return on_each_device(
        attend, *inputs, sharded=rules.shard_count("blocks", cache_mask.shape[1]) > 1
    )


def local_attention(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B N"],
    dropout: Dropout | None = None,
    *,
    attend_to_self: bool = True,
    scale: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> AttentionPart:
    """Computes `api.local_part` of tokens that may be sharded over devices."""

    def attend(*inputs: Any) -> AttentionPart:
        *others, scale = inputs
        return local_part(
            *others, attend_to_self=attend_to_self, scale=scale, implementation=implementation
        )

    inputs = queries, cached, keys, values, bias, first, dropout, scale
    # XLA cannot partition a kernel, so a kernel runs on each device's own arrays in a `shard_map`.
    # With dropout or with sharded blocks no kernel is used, and XLA partitions the whole program.
    if dropout is not None or rules.is_sharded("blocks"):
        return attend(*inputs)
    return on_each_device(attend, *inputs, sharded=False)


def on_each_device(
    attend: Callable[..., AttentionPart],
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    bias: Float[Array, "H W"] | None,
    per_block: Array,
    dropout: DropoutMask | None,
    scale: Float[Array, " H"] | None,
    *,
    sharded: bool,
) -> AttentionPart:
    """Runs `attend`, a function of the arguments up to `scale`, on each device's parts of them.

    `per_block` has a value for each block, such as a cache mask. If `sharded`, blocks are sharded.
    """
    members = queries.shape[2] // keys.shape[2]

    def attend_on_device(q, cached, k, v, *others):
        if k.shape[2] * members > q.shape[2]:
            own = functools.partial(
                local_groups, heads=q.shape[2], members=members, axis=_HEADS_AXIS
            )
            cached, k, v = (own(cached[0]), own(cached[1])), own(k), own(v)
        if sharded:
            cached = _window_from_left(cached[0], k), _window_from_left(cached[1], v)
        return attend(q, cached, k, v, *others)

    inputs = queries, cached, keys, values, bias, per_block, dropout, scale
    if not rules.partitioned():
        return attend_on_device(*inputs)
    tokens, blocks = ("tokens", "blocks") if sharded else (None, None)
    token_partition = rules.partition_spec("lanes", tokens, "heads", None, shape=queries.shape)
    key_partition = rules.partition_spec("lanes", tokens, "kv_heads", None, shape=keys.shape)
    before = rules.partition_spec("lanes", None, "kv_heads", None, shape=cached[0].shape)
    head_partition = P(token_partition[2])
    return jax.shard_map(
        attend_on_device,
        in_specs=(
            token_partition,
            (before, before),
            key_partition,
            key_partition,
            head_partition,
            rules.partition_spec("lanes", blocks, shape=per_block.shape),
            head_partition,
            head_partition,
        ),
        out_specs=AttentionPart(token_partition, P(*token_partition[:3])),
        axis_names=rules.automatic_axes(),
        check_vma=False,
    )(*inputs)


def _window_from_left(cached: Float[Array, "B W G K"], own: Float[Array, "B T G K"]) -> Array:
    """Returns the keys or values of the W tokens before a device's own tokens."""
    last, size = own[:, -cached.shape[1] :], jax.lax.axis_size(_SEQUENCE_AXIS)
    from_left = jax.lax.ppermute(last, _SEQUENCE_AXIS, [(i, i + 1) for i in range(size - 1)])
    return jnp.where(jax.lax.axis_index(_SEQUENCE_AXIS) == 0, cached, from_left)


def last_block(x: Float[Array, "B T H K"], window: int) -> Float[Array, "B W H K"]:
    """Returns the last `window` tokens of a segment, replicated on all devices that share it."""
    if rules.shard_count("blocks", x.shape[1] // window) == 1:
        return x[:, -window:]

    def share_last_block(own: Array) -> Array:
        is_last = jax.lax.axis_index(_SEQUENCE_AXIS) == jax.lax.axis_size(_SEQUENCE_AXIS) - 1
        return jax.lax.psum(jnp.where(is_last, own[:, -window:], 0), _SEQUENCE_AXIS)

    shared = jax.shard_map(
        share_last_block,
        in_specs=P(None, _SEQUENCE_AXIS),
        out_specs=P(),
        axis_names={_SEQUENCE_AXIS},
        check_vma=False,
    )
    return shared(x)
