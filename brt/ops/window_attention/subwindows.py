"""Attention to a long window, computed as attention to several shorter windows.

A kernel keeps the keys and values of two blocks on the chip, each as long as a window, so it
supports only windows up to a certain length. A longer window of W keys is split into sub-windows of
S keys, such as the nearest S keys, the S keys before these, and so on. If keys and values are
delayed by a multiple of S places, the keys of a sub-window become the nearest S keys, so a kernel
for windows of S keys computes the attention to them. The log-sum-exps of the sub-windows tell how
to combine their outputs.

In shapes, B is the number of rows of the batch, H of heads of queries, G of heads of keys and
values, T of tokens of a segment, K of numbers of a head, and D of parts of the segment, at whose
starts documents may start.
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
    """Returns the attention output of every token over the token's window, and the log-sum-exp of
    the token's logits.

    The output is in the dtype of `values`, the log-sum-exp in float32. For a token that sees no
    key, the log-sum-exp is `softmax.FLOOR`, plus the logarithm of the number of sub-windows.

    Args:
      attend: computes output and log-sum-exp for windows of `size` keys. It takes the following
        arguments; the places in `first` may be after the tokens themselves, which then see no key.
      size: S, the number of keys of a sub-window, by which W and T are divisible.
      queries, keys, values: the queries, keys and values of the segment.
      cached: keys and values of the W tokens before the segment.
      bias: the bias of each head and distance; column 0 is for the nearest key that a token sees.
      first: for each of D parts of the segment, the place of the first token of its document, a
        multiple of T / D. The segment begins at place 0, and cached tokens have negative places.
      options: keyword arguments of `attend`.
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
    """Returns the places of the first tokens of the documents in delayed keys.

    If the segment has at most one document in each block of `size` tokens, a kernel masks the
    previous block as a whole. Delayed documents may start inside of a block, or after it, so the
    segment is then split into smaller parts.
    """
    part = tokens // first.shape[1]
    if part % size == 0:
        first = jnp.repeat(first, 2 * part // size, axis=1)
    return first + delay
