"""Token scores and the cross-entropy loss with all logits at once; `chunk` is ignored."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.cross_entropy.chunks import TokenScores


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
    log_p = _log_p(hidden, embedding, bias, scale)
    nats = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    loss = (1 - smoothing) * nats - smoothing * jnp.mean(log_p, axis=-1)
    return jnp.sum(loss * mask), jax.lax.stop_gradient(jnp.sum(nats * mask))
