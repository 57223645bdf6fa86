"""Sliding-window attention (Block-Recurrent Transformers, section 3.1).

A segment is read in blocks of W tokens. A token attends to the W tokens that end with
itself (or with the one before it), wherever its block begins: keys of the block before
the segment come from the cache. XL is the case of one block a segment.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import DropoutMask
from brt.ops.normalization import l2_normalize, scaled_unit
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import MASKED, softmax_and_lse
from brt.ops.window_attention import (
    pallas_gpu,
    pallas_mosaic_gpu,
    pallas_tpu,
    reference,
    xla,
    xla_cpu,
)


def _joined(function: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation that reads all keys as one array, and normalised where they are to be."""

    def prepared(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        *others: Any, scale: Array | None, **options: bool,
    ) -> Any:  # fmt: skip
        keys, values = (
            jnp.concatenate(pair, axis=1) for pair in zip(cached, (keys, values), strict=True)
        )
        if scale is not None:
            queries, keys = scaled_unit(queries, scale), l2_normalize(keys)
        return function(queries, keys, values, *others, **options)

    return prepared


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `_joined`, of an implementation that multiplies with dropout's factors."""

    def multiplied(*inputs: Any, **options: bool) -> Any:
        *others, dropout = inputs
        factors = None if dropout is None else dropout.factors(jnp.dtype("float32"))
        return function(*others, factors, **options)

    return _joined(multiplied)


OP = Op(
    "window_attention",
    (
        Implementation("xla_cpu", _plain(xla_cpu.window_attention), auto=("cpu",)),
        Implementation(
            "pallas_tpu", pallas_tpu.window_attention, ("tpu",), ("tpu",), pallas_tpu.refuses
        ),
        Implementation(
            "pallas_gpu",
            _joined(pallas_gpu.window_attention),
            ("gpu",),
            ("gpu",),
            pallas_gpu.refuses,
        ),
        Implementation(
            "pallas_mosaic_gpu",
            _plain(pallas_mosaic_gpu.window_attention),
            ("gpu",),
            ("gpu",),
            pallas_mosaic_gpu.refuses,
        ),
        Implementation("xla", _plain(xla.window_attention)),
        Implementation("pallas_interpret", pallas_tpu.interpreted, auto=()),
        Implementation("pallas_gpu_interpret", _joined(pallas_gpu.interpreted), auto=()),
        Implementation("reference", _plain(reference.window_attention), auto=()),
    ),
)


def normalizes() -> bool:
    """Whether queries and keys are normalised more quickly by what attends with them."""
    return dispatch.policy().attention_normalizes


def window_part(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: DropoutMask | None = None,
    *,
    attend_to_self: bool = True,
    null_keys: bool = False,
    scale: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> AttentionPart:
    """Attention of every token to its window; logits are q.k + bias, unscaled.

    Args:
      queries: with any scale folded in.
      cached: keys and values of the block before the segment.
      bias: float32, by distance: column 0 is the nearest key that a token sees; None: none.
      cache_mask: whether block n may read the block before it (False where a document
        starts at n, or where the cache holds nothing).
      dropout: of the softmax of every block, [H, W, W] (slot c of row r: see `xla`).
      attend_to_self: whether the nearest key is the token itself.
      null_keys: unreadable keys count as zero keys with zero values, instead of not at
        all (the original's behaviour at a document's start).
      scale: if given, keys are normalised first, and queries to this length.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      One part of an attention that may read more: the output [B, T, H, K], in the dtype of
      `values`, zeros where a token sees no key; and float32 [B, T, H], the log-sum-exp, which
      knows nothing of dropout.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    part = dispatch.run(
        OP, implementation, queries, cached, keys, values, bias, cache_mask, dropout,
        attend_to_self=attend_to_self, null_keys=null_keys, scale=scale,
    )  # fmt: skip
    return AttentionPart(*part)


def window_part_step(
    query: Float[Array, "B H K"],
    keys: Float[Array, "B W H K"],
    values: Float[Array, "B W H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, " B"],
    position: Int[Array, ""],
    *,
    attend_to_self: bool = True,
    null_keys: bool = False,
) -> AttentionPart:
    """Row `position` of a block: `window_part` of one token, [B, H, K] and [B, H].

    `keys` and `values` are a ring: slots up to `position` hold the open block, with the
    token's own key in its slot, the others still hold the previous block, which is
    `cache_mask` or not. A strictly-past token's own slot still holds the previous block.
    """
    window = keys.shape[1]
    slots = jnp.arange(window)
    nearest = 0 if attend_to_self else 1
    own = slots <= position - nearest
    mask = (own[None] | cache_mask[:, None])[:, None]  # [B, 1, W]
    logits = jnp.einsum("bhk,bshk->bhs", query, keys, preferred_element_type=jnp.float32)
    if null_keys:
        logits = jnp.where(mask, logits, 0.0)
        values = jnp.where(mask[:, 0, :, None, None], values, 0)
    if bias is not None:
        logits += jnp.take(bias, (position - nearest - slots) % window, axis=1)[None]
    if not null_keys:
        logits = jnp.where(mask, logits, MASKED)
    weights, lse = softmax_and_lse(logits)
    return AttentionPart(jnp.einsum("bhs,bshk->bhk", weights.astype(values.dtype), values), lse)
