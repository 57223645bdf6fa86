"""Causal sliding-window attention (Block-Recurrent Transformers, section 3.1).

A token attends to at most W keys of its document. The nearest of these keys is the token's own key
or the key of the token before. The W keys before the segment come from the cache. A segment is read
in blocks, and documents start only at starts of blocks. If a block has W tokens, as in the paper,
the keys that a token sees are in its own block and in the block before. In Transformer-XL, a
segment is one block.

Tokens may be sharded by rows of the batch, heads and blocks. Each device computes the attention of
its own tokens in `shard_map`, because XLA's partitioner cannot split a kernel. If the blocks of a
segment are sharded, a device also reads the last W keys and values of the device that has the
tokens before its own. The first device reads the cache instead.

In shapes, H is the number of heads of queries, and G is the number of heads of keys. Each head of
keys serves H / G consecutive heads of queries.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.grouped_heads import local_groups
from brt.ops.partial_attention import AttentionPart, with_zero_values
from brt.ops.window_attention import chunks, pallas_gpu, pallas_tpu, reference, xla
from brt.ops.window_attention.inputs import WindowInputs

_SEQUENCE_AXIS, _HEADS_AXIS = "sequence", "tensor"
_Cached = tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]]


def _by_xla(inputs: WindowInputs, *, attend_to_self: bool, soft_cap: float = 0.0) -> AttentionPart:
    drawn = isinstance(inputs.dropout, Dropout)
    if inputs.part % inputs.window or drawn or soft_cap:
        return chunks.window_attention(inputs, attend_to_self=attend_to_self, soft_cap=soft_cap)
    return xla.window_attention(inputs, attend_to_self=attend_to_self)


def _drawn_refusal(inputs: WindowInputs, **_: Any) -> str | None:
    drawn = isinstance(inputs.dropout, Dropout)
    return dispatch.dropout_refusal(dropout=inputs.dropout if drawn else None)


def _kernel_refusal(inputs: WindowInputs, soft_cap: float = 0.0, **_: Any) -> str | None:
    if soft_cap:
        return "does not cap logits; set SelfAttention.soft_cap to 0"
    if rules.is_sharded("blocks"):
        return "reads segments that each device has as a whole; set Mesh.sequence to 1"
    return _drawn_refusal(inputs)


def _interpreter_refusal(inputs: WindowInputs, **options: Any) -> str | None:
    tokens, window = inputs.queries.shape[1], inputs.window
    if tokens % window:
        return f"reads segments of a multiple of the window of {window} tokens, not of {tokens}"
    return _kernel_refusal(inputs, **options)


def _tpu_refusal(inputs: WindowInputs, **options: Any) -> str | None:
    return pallas_tpu.refusal(inputs) or _kernel_refusal(inputs, **options)


def _gpu_refusal(inputs: WindowInputs, **options: Any) -> str | None:
    return pallas_gpu.refusal(inputs) or _kernel_refusal(inputs, **options)


OP = Op(
    "window_attention",
    (
        Implementation("pallas_tpu", pallas_tpu.window_attention, _tpu_refusal),
        Implementation("pallas_gpu", pallas_gpu.window_attention, _gpu_refusal),
        Implementation("xla", _by_xla),
        Implementation("pallas_interpret", pallas_tpu.interpreted, _interpreter_refusal),
        Implementation("reference", reference.window_attention, _drawn_refusal),
    ),
)


def local_attention(
    queries: Float[Array, "B T H K"],
    cached: _Cached,
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B N"],
    dropout: Dropout | None = None,
    *,
    attend_to_self: bool = True,
    soft_cap: float = 0.0,
    scale: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> AttentionPart:
    """Returns the attention output of every token over the token's window.

    The logits are q.k, capped by `softmax.soft_capped`, + bias. The output is 0 where a token sees
    no key. Dropout does not affect the log-sum-exp.

    Args:
      queries: already multiplied by any scale, unless `scale` is given.
      cached: keys and values of the W tokens before the segment, oldest first.
      bias: column 0 is for the nearest key that a token sees.
      first: for each of N blocks, the place of the first token of the block's document. This place
        is a multiple of the length of a block. The segment begins at place 0, and cached tokens
        have negative places.
      attend_to_self: True if the nearest key that a token sees is the token's own, False if it is
        the key of the token before.
      scale: if given, the keys are first scaled to norm 1, and the queries of head h to norm
        scale[h].
    """
    inputs = WindowInputs(queries, cached, keys, values, bias, first, dropout, scale)
    options = {"attend_to_self": attend_to_self} | ({"soft_cap": soft_cap} if soft_cap else {})
    attend = functools.partial(dispatch.run, OP, implementation, **options)
    # With dropout or with sharded blocks, no kernel is used. XLA then partitions the computation,
    # so `shard_map` is not needed.
    if dropout is not None or rules.is_sharded("blocks"):
        return attend(inputs)
    return _on_each_device(attend, inputs, sharded=False)


def window_part(
    queries: Float[Array, "B T H K"],
    cached: _Cached,
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
    """Returns what `local_attention` returns, for blocks of W tokens.

    Args:
      cache_mask: True where block n may read the block before it. It is False where a document
        starts at block n, and for block 0 if the cache is empty.
      dropout: a mask [H, W, W], the same for all blocks, whose axes are heads, queries of a block
        and slots. A query sees W of the 2 W keys of its own block and the block before. Slot c is
        for key c of its own block if the query sees that key; else, for key c of the one before.
      null_keys: If True, the keys that `cache_mask` hides take part in the softmax as zero keys
        with zero values, as in the original code. If False, they are left out of the softmax.
    """

    def attend(inputs: WindowInputs) -> AttentionPart:
        cache_mask = inputs.first
        inputs = inputs._replace(first=document_places(cache_mask, inputs.window))
        part = dispatch.run(OP, implementation, inputs, attend_to_self=attend_to_self)
        if not null_keys:
            return part
        return with_null_keys(part, inputs.bias, cache_mask, attend_to_self)

    # Here, the field `first` holds `cache_mask`. Each device computes the places of its own blocks
    # from its part of the mask.
    inputs = WindowInputs(queries, cached, keys, values, bias, cache_mask, dropout, scale)
    sharded = rules.shard_count("blocks", cache_mask.shape[1]) > 1
    return _on_each_device(attend, inputs, sharded=sharded)


def document_places(cache_mask: Bool[Array, "B N"], window: int) -> Int[Array, "B N"]:
    """Returns, for each block of W = `window` tokens, the place of its document's first token.

    If the document starts before the segment, the place is -W, that of the first cached token.
    """
    starts = window * jnp.arange(cache_mask.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(cache_mask, -window, starts), axis=1)


def with_null_keys(
    part: AttentionPart,
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    attend_to_self: bool,
) -> AttentionPart:
    """Adds zero keys with zero values to the softmax, for the keys that `cache_mask` hides."""
    (batch, tokens, heads), blocks = part.lse.shape, cache_mask.shape[1]
    window = tokens // blocks
    if bias is None:
        bias = jnp.zeros((heads, window), jnp.float32)
    # Of the columns of the bias for query r of a block, those from r + 1 on belong to keys of the
    # block before. If queries do not see their own keys, these are the columns from r on.
    hidden = jax.lax.cumlogsumexp(bias, axis=1, reverse=True)
    if attend_to_self:
        hidden = jnp.pad(hidden[:, 1:], ((0, 0), (0, 1)), constant_values=-jnp.inf)
    hidden = jnp.where(cache_mask[:, :, None, None], -jnp.inf, hidden.T)
    return with_zero_values(part, hidden.reshape(batch, tokens, heads))


def _on_each_device(
    attend: Callable[[WindowInputs], AttentionPart], inputs: WindowInputs, *, sharded: bool
) -> AttentionPart:
    """Runs `attend` on each device, with the device's parts of the inputs.

    If `sharded` is True, the blocks are divided among devices, too.
    """
    members = inputs.queries.shape[2] // inputs.keys.shape[2]

    def attend_on_device(own: WindowInputs) -> AttentionPart:
        cached, heads = own.cached, own.queries.shape[2]
        # If keys are not split by head, the device takes the heads of keys that its queries need.
        if own.keys.shape[2] * members > heads:
            take = functools.partial(local_groups, heads=heads, members=members, axis=_HEADS_AXIS)
            cached = take(cached[0]), take(cached[1])
            own = own._replace(keys=take(own.keys), values=take(own.values))
        if sharded:
            keys, values = cached
            cached = _window_from_left(keys, own.keys), _window_from_left(values, own.values)
        return attend(own._replace(cached=cached))

    if not rules.partitioned():
        return attend_on_device(inputs)
    tokens, blocks = ("tokens", "blocks") if sharded else (None, None)
    by_token = rules.partition_spec("lanes", tokens, "heads", None, shape=inputs.queries.shape)
    by_key = rules.partition_spec("lanes", tokens, "kv_heads", None, shape=inputs.keys.shape)
    before = rules.partition_spec("lanes", None, "kv_heads", None, shape=inputs.cached[0].shape)
    by_block = rules.partition_spec("lanes", blocks, shape=inputs.first.shape)
    by_head = P(by_token[2])
    specs = WindowInputs(
        by_token, (before, before), by_key, by_key, by_head, by_block, by_head, by_head
    )
    results = AttentionPart(by_token, P(*by_token[:3]))
    return dispatch.on_devices(attend_on_device, (specs,), results)(inputs)


def _window_from_left(cached: Float[Array, "B W G K"], own: Float[Array, "B T G K"]) -> Array:
    """Returns the keys or values of the W tokens before a device's own tokens."""
    last, size = own[:, -cached.shape[1] :], jax.lax.axis_size(_SEQUENCE_AXIS)
    from_left = jax.lax.ppermute(last, _SEQUENCE_AXIS, [(i, i + 1) for i in range(size - 1)])
    return jnp.where(jax.lax.axis_index(_SEQUENCE_AXIS) == 0, cached, from_left)


def last_block(x: Float[Array, "B T H K"], window: int) -> Float[Array, "B W H K"]:
    """Returns the last `window` tokens of a segment, on every device that has a part of it."""
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
