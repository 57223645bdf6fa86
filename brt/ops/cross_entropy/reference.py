"""Reference implementation of token scores and the cross-entropy loss.

In shapes, B is the number of rows of the batch, T of tokens of a row, D of numbers of a token's
vector, and V of tokens of the vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.cross_entropy.scored import TokenScores


def _log_p(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    scale: float,
) -> Float[Array, "B T V"]:
    logits = scale * jnp.einsum("btd,vd->btv", hidden, embedding)
    return jax.nn.log_softmax(logits if bias is None else logits + bias[None, None])


def token_scores(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    bias: Float[Array, " V"] | None,
    *,
    scale: float,
    chunk: int,
) -> TokenScores:
    """Returns the negative log probability of each target, and whether the target is the most
    probable token.

    Args:
      hidden: the vectors of the tokens; the logits are scale * hidden @ embedding.T + bias.
      embedding: the embeddings of the vocabulary.
      targets: the token to score at each position.
      bias: a bias of the logits, or None.
      scale: factor of the logits.
      chunk: ignored; all logits exist at once.
    """
    log_p = _log_p(hidden, embedding, bias, scale)
    target_log_p = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return TokenScores(-target_log_p, target_log_p == jnp.max(log_p, axis=-1))


def cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    bias: Float[Array, " V"] | None,
    *,
    scale: float,
    chunk: int,
    smoothing: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the summed cross-entropy of the targets, with label smoothing and without, as two
    scalars.

    Only the sum with label smoothing has a gradient.

    Args:
      hidden: the vectors of the tokens; the logits are scale * hidden @ embedding.T + bias.
      embedding: the embeddings of the vocabulary.
      targets: the target of each position.
      mask: False where a target does not count.
      bias: a bias of the logits, or None.
      scale: factor of the logits.
      chunk: ignored; all logits exist at once.
      smoothing: the fraction of each target's probability that is distributed evenly over all
        tokens.
    """
    log_p = _log_p(hidden, embedding, bias, scale)
    nats = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    loss = (1 - smoothing) * nats - smoothing * jnp.mean(log_p, axis=-1)
    return jnp.sum(loss * mask), jax.lax.stop_gradient(jnp.sum(nats * mask))
