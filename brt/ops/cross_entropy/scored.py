"""The result type of `token_scores`."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float


class TokenScores(NamedTuple):
    """Scores of the target tokens."""

    nats: Float[Array, "B T"]  # the negative log probability of the target
    # Whether the target is the most probable token. If another token is equally probable, the value
    # depends on the implementation.
    right: Bool[Array, "B T"]
