"""Prediction of a span of tokens. Each token has a logit for the start and one for the end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Spans(NamedTuple):
    """The best span of each sequence."""

    start: Int[Array, " B"]  # int32, the index of the first token
    end: Int[Array, " B"]  # int32, the index of the last token
    # The sum of the two logits, or the lowest finite number if no span is allowed; `start` and
    # `end` then have no meaning.
    score: Float[Array, " B"]


def span_nats(
    logits: Float[Array, "B T 2"], targets: Int[Array, "B 2"], scored: Bool[Array, "B 2"]
) -> Float[Array, "B 2"]:
    """Returns the negative log probabilities of the correct starts and ends, 0 where not `scored`.

    The softmax is over all T positions, including padding.
    """
    log_probs = jax.nn.log_softmax(logits, axis=1)
    chosen = jnp.take_along_axis(log_probs, targets[:, None, :], axis=1)[:, 0]
    return jnp.where(scored, -chosen, 0.0)


def best_spans(logits: Float[Array, "B T 2"], allowed: Bool[Array, "B T"], longest: int) -> Spans:
    """Returns the span of 1 to `longest` allowed tokens with the highest sum of its two logits.

    If several spans have this sum, the result is the span that starts first. If several of them
    start there, it is the shortest. The allowed tokens must be contiguous.
    """
    floor = jnp.finfo(logits.dtype).min
    start, end = (jnp.where(allowed, logits[..., i], floor) for i in range(2))
    longest = min(longest, logits.shape[1])
    behind = jnp.pad(end, ((0, 0), (0, longest - 1)), constant_values=floor)
    ends = jnp.stack([behind[:, i : i + end.shape[1]] for i in range(longest)], axis=-1)
    best = jnp.max(ends, axis=-1)
    sums = jnp.where((start > floor) & (best > floor), start + best, floor)
    first = jnp.argmax(sums, axis=1)
    rows = jnp.arange(len(first))
    return Spans(first, first + jnp.argmax(ends[rows, first], axis=-1), sums[rows, first])
