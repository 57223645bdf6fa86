"""What token logits are returned as."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Scored(NamedTuple):
    """Of every token, float32.

    Attributes:
      nats: -log p of its target.
      logits: of every token of the vocabulary.
      lse: their log-sum-exp.
    """

    nats: Float[Array, "*B"]
    logits: Float[Array, "*B V"]
    lse: Float[Array, "*B"]
