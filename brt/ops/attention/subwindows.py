"""Attention to a long window, computed as attention to several shorter windows.

A kernel keeps the keys and values of two blocks on the chip, so it supports only windows up to a
certain length. A longer window is split into sub-windows of S keys. If keys and values are delayed
by a multiple of S places, the keys of a sub-window become the nearest S keys of a query. The
log-sum-exps tell how to combine the outputs. In shapes, D is the number of parts of the segment, at
whose starts documents may start.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.partial_attention import AttentionPart, merge_parts


def attend_to_subwindows(
    attend: Callable[..., Any],
    size: int,
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B D"],
    **options: Any,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Computes window attention by calls of `attend` for windows of `size` keys.

    If a token sees no key, the log-sum-exp is `softmax.FLOOR` plus the logarithm of the number of
    sub-windows. The place `first` of a document's first token (see `documents`) may be after the
    tokens that `attend` gets, which then see no key.
    """
    window, tokens = cached[0].shape[1], keys.shape[1]
    joined = [jnp.concatenate(pair, axis=1) for pair in zip(cached, (keys, values), strict=True)]
    results = []
    for delay in range(0, window, size):
        begin = window - delay
        before = tuple(x[:, begin - size : begin] for x in joined)
        own = (x[:, begin : begin + tokens] for x in joined)
        biases = None if bias is None else bias[:, delay : delay + size]
        places = _delayed(first, tokens, size, delay) if delay else first
        results.append(AttentionPart(*attend(queries, before, *own, biases, places, **options)))
    merged = merge_parts(results)
    return merged.output.astype(values.dtype), merged.lse


def _delayed(first: Int[Array, "B D"], tokens: int, size: int, delay: int) -> Int[Array, "B D2"]:
    """Returns the places of the first tokens of the documents in delayed keys."""
    part = tokens // first.shape[1]
    # If the segment has at most one document in each block of `size` tokens, a kernel masks the
    # previous block as a whole. Delayed documents may start inside of a block, or after it, so the
    # segment is then split into smaller parts.
    if part % size == 0:
        first = jnp.repeat(first, 2 * part // size, axis=1)
    return first + delay
