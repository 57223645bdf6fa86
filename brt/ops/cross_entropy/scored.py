"""The result type of `token_scores`, which computes the scores of target tokens."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float


class TokenScores(NamedTuple):
    """Scores of the target tokens: negative log probabilities, and a mask of correct predictions.

    Both arrays have an entry for each of the T positions of each of the B rows of the batch.

    Attributes:
      nats: the negative log probability of the target, float32.
      right: True if the target is the most probable token of the vocabulary. If another token is
        equally probable, the value depends on the implementation.
    """

    nats: Float[Array, "B T"]
    right: Bool[Array, "B T"]
