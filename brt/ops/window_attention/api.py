"""Sliding-window attention (Block-Recurrent Transformers, section 3.1).

A segment is read in blocks of W tokens. A token attends to W tokens: itself and the W - 1 tokens
before it, or the W tokens before it. These tokens are in the token's own block and in the block
before. The keys and values of the block before the segment come from the cache. Transformer-XL is
the special case of one block per segment.

In shapes, B is the number of rows of the batch, H of heads of queries, G of heads of keys and
values (each serves H / G consecutive heads of queries), K of numbers of a head, T of tokens of a
segment, and N of its blocks of W tokens.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import DropoutMask
from brt.ops.grouped_heads import by_head_of_group
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention import (
    pallas_gpu,
    pallas_mosaic_gpu,
    pallas_tpu,
    reference,
    tpu_windows,
    xla,
    xla_cpu,
)
from brt.ops.window_attention.documents import with_cache_mask
from brt.ops.window_attention.joined_keys import with_joined_keys


def _with_dropout_factors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an implementation that needs as many heads of keys as of queries, one array of cached
    and new keys, and dropout as factors of the weights.
    """

    def attend_with_factors(*inputs: Any, **options: bool) -> Any:
        """Converts a `DropoutMask` to factors of the weights, calls `function`, and returns its
        result.

        Args:
          inputs: the positional arguments of `function`, the last of which is here a `DropoutMask`
            instead of factors; None for no dropout.
          options: the keyword arguments of `function`.
        """
        *others, dropout = inputs
        factors = None if dropout is None else dropout.factors(jnp.dtype("float32"))
        return function(*others, factors, **options)

    return by_head_of_group(with_joined_keys(attend_with_factors))


OP = Op(
    "window_attention",
    (
        Implementation("xla_cpu", _with_dropout_factors(xla_cpu.window_attention), auto=("cpu",)),
        Implementation(
            "pallas_tpu",
            with_cache_mask(pallas_tpu.window_attention),
            ("tpu",),
            ("tpu",),
            tpu_windows.refusal,
        ),
        Implementation(
            "pallas_mosaic_gpu",
            _with_dropout_factors(pallas_mosaic_gpu.window_attention),
            ("gpu",),
            ("gpu",),
            pallas_mosaic_gpu.refusal,
        ),
        Implementation(
            "pallas_gpu",
            with_cache_mask(with_joined_keys(pallas_gpu.window_attention)),
            ("gpu",),
            ("gpu",),
            pallas_gpu.refusal,
        ),
        Implementation("xla", _with_dropout_factors(xla.window_attention)),
        Implementation("pallas_interpret", with_cache_mask(pallas_tpu.interpreted), auto=()),
        Implementation(
            "pallas_gpu_interpret",
            with_cache_mask(with_joined_keys(pallas_gpu.interpreted)),
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
    """Returns the attention output of every token over the token's window, and the log-sum-exp of
    the token's logits.

    The logits are q.k + bias.

    Args:
      queries: queries of the segment. If `scale` is None, the caller has already multiplied them by
        the factor of the logits.
      cached: keys and values of the block before the segment.
      keys: keys of the segment.
      values: values of the segment.
      bias: float32, the bias of each head and distance; column 0 is for the nearest key that a
        token sees. None stands for no bias.
      cache_mask: True where block n may read the block before it. False where a document starts at
        block n, or where the cache is empty.
      dropout: dropout of the softmax weights, which is the same for all blocks; None for no
        dropout. The axes of the mask [H, W, W] are the heads, the queries of a block and the slots
        of a query. A query has W slots, because it sees exactly W of the 2 W keys of its own block
        and the block before: slot c is key c of the own block if the query sees this key, and
        otherwise key c of the block before.
      attend_to_self: True if the nearest key is the token itself, False if it is the token before.
      null_keys: True makes keys that `cache_mask` hides count as zero keys with zero values, as in
        the original code of the block-recurrent transformer. False excludes these keys from the
        softmax.
      scale: if not None, the keys are first scaled to norm 1, and the queries of head h to norm
        scale[h].
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The attention output [B, T, H, K] in the dtype of `values`, with zeros where a token sees no
        key, and the float32 log-sum-exp [B, T, H] of the logits, which dropout does not affect.
        The function `partial_attention.merge_parts` combines the result with attention to other
        keys.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    part = dispatch.run(
        OP, implementation, queries, cached, keys, values, bias, cache_mask, dropout,
        attend_to_self=attend_to_self, null_keys=null_keys, scale=scale,
    )  # fmt: skip
    return AttentionPart(*part)
