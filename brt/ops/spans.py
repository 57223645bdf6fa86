"""Parts of a sequence, by logits of where they start and of where they end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Spans(NamedTuple):
    """The best span of each sequence.

    Attributes:
      start, end: its first and its last token.
      score: the sum of both logits; the lowest number there is where nothing is allowed.
    """

    start: Int[Array, " B"]
    end: Int[Array, " B"]
    score: Float[Array, " B"]


def span_nats(
    logits: Float[Array, "B T 2"], targets: Int[Array, "B 2"], scored: Bool[Array, "B 2"]
) -> Float[Array, "B 2"]:
    """-log p of the start and of the end, each of all T places; 0 where not scored.

    Padding is as unlikely as its logits say.
    """
    log_probs = jax.nn.log_softmax(logits, axis=1)
    chosen = jnp.take_along_axis(log_probs, targets[:, None, :], axis=1)[:, 0]
    return jnp.where(scored, -chosen, 0.0)


def best_spans(logits: Float[Array, "B T 2"], allowed: Bool[Array, "B T"], longest: int) -> Spans:
    """The span of 1 to `longest` allowed tokens whose logits of start and end add up highest.

    Of equally good ones the first, and of these the shortest. Allowed tokens are neighbours.
    """
    floor = jnp.finfo(logits.dtype).min
    start, end = (jnp.where(allowed, logits[..., i], floor) for i in range(2))
    longest = min(longest, logits.shape[1])
    behind = jnp.pad(end, ((0, 0), (0, longest - 1)), constant_values=floor)
    ends = jnp.stack([behind[:, i : i + end.shape[1]] for i in range(longest)], axis=-1)
    best = jnp.max(ends, axis=-1)
    both = jnp.where((start > floor) & (best > floor), start + best, floor)
    first = jnp.argmax(both, axis=1)
    rows = jnp.arange(len(first))
    return Spans(first, first + jnp.argmax(ends[rows, first], axis=-1), both[rows, first])
