"""Sliding-window attention (Block-Recurrent Transformers, section 3.1).

A segment is read in N blocks of W tokens. A token attends to W tokens, up to itself or to the token
before it. They are in its own block and in the block before, which for the first block of the
segment comes from the cache. Transformer-XL is the special case of one block per segment.

In shapes, H is the number of heads of queries, and G of heads of keys, each of which serves H / G
consecutive heads of queries.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops import dispatch
from brt.ops.attention import tpu
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import DropoutMask
from brt.ops.grouped_heads import by_head_of_group
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention import pallas_gpu, reference, xla
from brt.ops.window_attention.documents import with_cache_mask
from brt.ops.window_attention.joined_keys import with_joined_keys


def _with_dropout_factors(function: Callable[..., Any]) -> Callable[..., Any]:
    # `function` needs as many heads of keys as of queries, one array of cached and new keys, and
    # dropout as factors of the weights.
    def attend_with_factors(*inputs: Any, **options: bool) -> Any:
        *others, dropout = inputs
        factors = None if dropout is None else dropout.factors(jnp.dtype("float32"))
        return function(*others, factors, **options)

    return by_head_of_group(with_joined_keys(attend_with_factors))


def _tpu_refusal(queries: Array, cached: tuple[Array, Array], *others: Any, **_: Any) -> str | None:
    return tpu.window_refusal(queries, cached[0].shape[1], drops=others[4] is not None)


OP = Op(
    "window_attention",
    (
        Implementation(
            "pallas_tpu",
            with_cache_mask(tpu.attend_to_window),
            ("tpu",),
            ("tpu",),
            _tpu_refusal,
        ),
        Implementation(
            "pallas_gpu",
            with_cache_mask(with_joined_keys(pallas_gpu.window_attention)),
            ("gpu",),
            ("gpu",),
            pallas_gpu.refusal,
        ),
        Implementation("xla", _with_dropout_factors(xla.window_attention)),
        Implementation(
            "pallas_interpret",
            with_cache_mask(functools.partial(tpu.attend_to_window, interpret=True)),
            auto=(),
        ),
        Implementation("reference", _with_dropout_factors(reference.window_attention), auto=()),
    ),
)


def window_part(
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
    """Returns the attention output of every token over the token's window.

    The logits are q.k + bias. The output is 0 where a token sees no key. Dropout does not affect
    the log-sum-exp.

    Args:
      queries: already multiplied by any scale, unless `scale` is given.
      cached: keys and values of the block before the segment.
      bias: column 0 is for the nearest key that a token sees.
      cache_mask: False where a document starts at block n, or where the cache is empty.
      dropout: a mask [H, W, W] of heads, queries of a block and slots, the same for all blocks. A
        query sees W of the 2 W keys of its own block and the block before: slot c is key c of the
        own block if the query sees it, and otherwise key c of the block before.
      attend_to_self: whether the nearest key is the token itself or the token before.
      null_keys: True makes keys that `cache_mask` hides count as zero keys with zero values, as in
        the original code. False excludes these keys from the softmax.
      scale: if given, the keys are first scaled to norm 1, and the queries of head h to norm
        scale[h].
    """
    part = dispatch.run(
        OP, implementation, queries, cached, keys, values, bias, cache_mask, dropout,
        attend_to_self=attend_to_self, scale=scale,
    )  # fmt: skip
    part = AttentionPart(*part)
    return with_null_keys(part, bias, cache_mask, attend_to_self) if null_keys else part


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
