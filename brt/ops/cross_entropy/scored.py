"""Scores of tokens."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float


class TokenScores(NamedTuple):
    """Scores of every token.

    Attributes:
      nats: -log p of its target, float32.
      right: True if no other token is more probable than the target.
    """

    nats: Float[Array, "B T"]
    right: Bool[Array, "B T"]
