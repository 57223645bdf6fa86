"""What tokens are scored as."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float


class Scored(NamedTuple):
    """Of every token.

    Attributes:
      nats: -log p of its target, float32.
      right: whether no token is likelier than its target.
    """

    nats: Float[Array, "B T"]
    right: Bool[Array, "B T"]
