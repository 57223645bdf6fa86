"""Token scores and the cross-entropy loss with all logits at once; `chunk` is ignored."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.cross_entropy.chunks import Targets, TokenScores
from brt.ops.softmax import soft_capped


def _log_p(
    x: Targets, scale: float, soft_cap: float
) -> tuple[Float[Array, "B T V"], Float[Array, "B T"]]:
    """Returns the log probabilities of all tokens, and those of the targets."""
    logits = soft_capped(scale * jnp.einsum("btd,vd->btv", x.hidden, x.embedding), soft_cap)
    log_p = jax.nn.log_softmax(logits if x.bias is None else logits + x.bias[None, None])
    return log_p, jnp.take_along_axis(log_p, x.targets[..., None], axis=-1)[..., 0]


def token_scores(x: Targets, *, scale: float, chunk: int, soft_cap: float = 0.0) -> TokenScores:
    log_p, of_target = _log_p(x, scale, soft_cap)
    return TokenScores(-of_target, of_target == jnp.max(log_p, axis=-1))


def cross_entropy(
    x: Targets, *, scale: float, chunk: int, smoothing: float, soft_cap: float = 0.0
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    assert x.mask is not None
    log_p, of_target = _log_p(x, scale, soft_cap)
    loss = -(1 - smoothing) * of_target - smoothing * jnp.mean(log_p, axis=-1)
    return jnp.sum(loss * x.mask), jax.lax.stop_gradient(jnp.sum(-of_target * x.mask))
