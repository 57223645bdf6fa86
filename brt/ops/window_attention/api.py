"""Causal sliding-window attention (Block-Recurrent Transformers, section 3.1).

A token attends to the W keys of its document up to itself, or to the token before it. W keys before
the segment come from the cache. A segment is read in blocks, and documents start only at starts of
blocks. If a block has W tokens, as in the paper, a token's keys are in its own block and in the one
before; Transformer-XL is the special case of one block per segment.

In shapes, H is the number of heads of queries, and G of heads of keys, each of which serves H / G
consecutive heads of queries; Z = W + T.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.attention import tpu
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.grouped_heads import by_head_of_group
from brt.ops.normalization import l2_normalize, scaled_unit
from brt.ops.partial_attention import AttentionPart
from brt.ops.tpu import LANES
from brt.ops.window_attention import chunks, pallas_gpu, reference, xla

_Cached = tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]]


def with_joined_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of `function` that takes the cached keys and values as separate arrays.

    The returned function also normalizes queries and keys if a scale is passed.
    """

    def attend_to_joined_keys(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        *others: Any, scale: Array | None, **options: Any,
    ) -> Any:  # fmt: skip
        keys, values = (
            jnp.concatenate(pair, axis=1) for pair in zip(cached, (keys, values), strict=True)
        )
        if scale is not None:
            queries, keys = scaled_unit(queries, scale), l2_normalize(keys)
        return function(queries, keys, values, *others, **options)

    return attend_to_joined_keys


def _in_tiles(
    queries: Array, keys: Array, values: Array, bias: Array | None, first: Array,
    dropout: DropoutMask | None, **options: Any,
) -> Any:  # fmt: skip
    # The blocks of W tokens are in parts of the segment that begin with a document or a block.
    window = keys.shape[1] - queries.shape[1]
    blocks = queries.shape[1] // window
    starts = window * jnp.arange(blocks, dtype=jnp.int32)
    readable = jnp.repeat(first, blocks // first.shape[1], axis=1) < starts[None]
    factors = None if dropout is None else dropout.factors(jnp.dtype("float32"))
    return xla.window_attention(queries, keys, values, bias, readable, factors, **options)


_BY_TILES = by_head_of_group(with_joined_keys(_in_tiles))
_BY_CHUNKS = with_joined_keys(chunks.window_attention)


def _by_xla(
    queries: Array, cached: tuple[Array, Array], keys: Array, values: Array, bias: Array | None,
    first: Array, dropout: Any, **options: Any,
) -> Any:  # fmt: skip
    whole = (queries.shape[1] // first.shape[1]) % cached[0].shape[1] == 0
    attend = _BY_TILES if whole and not isinstance(dropout, Dropout) else _BY_CHUNKS
    return attend(queries, cached, keys, values, bias, first, dropout, **options)


def _kernel_refusal(*inputs: Any, **_: Any) -> str | None:
    if rules.is_sharded("blocks"):
        return "reads segments that each device has as a whole; set Mesh.sequence to 1"
    dropout = inputs[6]
    return dispatch.dropout_refusal(dropout=dropout if isinstance(dropout, Dropout) else None)


def _interpreter_refusal(
    queries: Array, cached: tuple[Array, Array], *others: Any, **_: Any
) -> str | None:
    tokens, window = queries.shape[1], cached[0].shape[1]
    if tokens % window:
        return f"reads segments of a multiple of the window of {window} tokens, not of {tokens}"
    return _kernel_refusal(queries, cached, *others)


def _tpu_refusal(queries: Array, cached: tuple[Array, Array], *others: Any, **_: Any) -> str | None:
    first, dropout = others[3:5]
    if reason := tpu.window_refusal(queries, cached[0].shape[1], drops=dropout is not None):
        return reason
    # No document may start inside of a tile of queries.
    block = queries.shape[1] // first.shape[1]
    if block % LANES:
        return f"reads blocks of a multiple of {LANES}, not of {block}"
    return _kernel_refusal(queries, cached, *others)


def _gpu_refusal(*inputs: Any, **_: Any) -> str | None:
    return pallas_gpu.refusal(*inputs) or _kernel_refusal(*inputs)


def _reference_refusal(*inputs: Any, **_: Any) -> str | None:
    drawn = isinstance(inputs[6], Dropout)
    return dispatch.dropout_refusal(dropout=inputs[6] if drawn else None)


OP = Op(
    "window_attention",
    (
        Implementation("pallas_tpu", tpu.attend_to_window, ("tpu",), ("tpu",), _tpu_refusal),
        Implementation(
            "pallas_gpu", with_joined_keys(pallas_gpu.window_attention), ("gpu",), ("gpu",),
            _gpu_refusal,
        ),
        Implementation("xla", _by_xla),
        Implementation(
            "pallas_interpret", functools.partial(tpu.attend_to_window, interpret=True), auto=(),
            refusal=_interpreter_refusal,
        ),
        Implementation(
            "reference", with_joined_keys(reference.window_attention), auto=(),
            refusal=_reference_refusal,
        ),
    ),
)  # fmt: skip


def local_part(
    queries: Float[Array, "B T H K"],
    cached: _Cached,
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B N"],
    dropout: Dropout | DropoutMask | None = None,
    *,
    attend_to_self: bool = True,
    scale: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> AttentionPart:
    """Returns the attention output of every token over the token's window.

    The logits are q.k + bias. The output is 0 where a token sees no key. Dropout does not affect
    the log-sum-exp.

    Args:
      queries: already multiplied by any scale, unless `scale` is given.
      cached: keys and values of the W tokens before the segment, oldest first.
      bias: column 0 is for the nearest key that a token sees.
      first: for each of N blocks, the place of the first token of its document, a multiple of the
        length of a block. The segment begins at place 0, and cached tokens have negative places.
      dropout: if blocks have W tokens, it may be a mask [H, W, W] of heads, queries of a block and
        slots, the same for all blocks. A query sees W of the 2 W keys of its own block and the
        block before: slot c is key c of the own block if the query sees it, and otherwise key c of
        the block before.
      attend_to_self: whether the nearest key is the token itself or the token before.
      scale: if given, the keys are first scaled to norm 1, and the queries of head h to norm
        scale[h].
    """
    part = dispatch.run(
        OP, implementation, queries, cached, keys, values, bias, first, dropout,
        attend_to_self=attend_to_self, scale=scale,
    )  # fmt: skip
    return AttentionPart(*part)


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
    """Computes `local_part` of blocks of W tokens.

    Args:
      cache_mask: False where a document starts at block n, or where the cache is empty.
      null_keys: True makes keys that `cache_mask` hides count as zero keys with zero values, as in
        the original code. False excludes these keys from the softmax.
    """
    part = local_part(
        queries, cached, keys, values, bias, document_places(cache_mask, cached[0].shape[1]),
        dropout, attend_to_self=attend_to_self, scale=scale, implementation=implementation,
    )  # fmt: skip
    return with_null_keys(part, bias, cache_mask, attend_to_self) if null_keys else part


def document_places(cache_mask: Bool[Array, "B N"], window: int) -> Int[Array, "B N"]:
    """Returns the place of the first token of the document of each block of W = `window` tokens.

    It is -W, the place of the first cached token, if the document starts before the segment.
    """
    starts = window * jnp.arange(cache_mask.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(cache_mask, -window, starts), axis=1)


def with_null_keys(
    part: AttentionPart,
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    attend_to_self: bool,
) -> AttentionPart:
    """Adds the keys that `cache_mask` hides to the softmax, as zero keys with zero values."""
    (batch, tokens, heads), blocks = part.lse.shape, cache_mask.shape[1]
    window = tokens // blocks
    if bias is None:
        bias = jnp.zeros((heads, window), jnp.float32)
    # Query r of a block has the keys of the block before in the columns of the bias from r + 1 on,
    # or from r on if it does not see itself.
    hidden = jax.lax.cumlogsumexp(bias, axis=1, reverse=True)
    if attend_to_self:
        hidden = jnp.pad(hidden[:, 1:], ((0, 0), (0, 1)), constant_values=-jnp.inf)
    hidden = jnp.where(cache_mask[:, :, None, None], -jnp.inf, hidden.T)
    lse = jnp.logaddexp(part.lse, hidden.reshape(batch, tokens, heads))
    share = jnp.exp(part.lse - lse)[..., None]
    return AttentionPart((part.output * share).astype(part.output.dtype), lse)
