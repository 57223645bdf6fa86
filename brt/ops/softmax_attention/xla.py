"""Softmax attention over all keys in plain XLA, with a hand-written backward pass.

Autodiff would save three arrays of Q x S numbers, and a scan would stack each of these arrays. The
hand-written pass needs only one of them. For each query, the gradient of the softmax subtracts a
sum over S keys. This sum equals the dot product of the query's output and the output's gradient,
which is a sum over K numbers only.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.products import einsum
from brt.ops.softmax import MASKED


def attend_by_head(
    queries: Float[Array, "*B H Q K"],
    keys: Float[Array, "*B H S K"],
    values: Float[Array, "*B H S K"],
    mask: Bool[Array, "*B S"] | Bool[Array, "*B Q S"] | None,
    dropout: Float[Array, "*B H Q S"] | None = None,
) -> Float[Array, "*B H Q K"]:
    """Returns the attention of every query to the keys where the mask is True.

    Every query must see at least one key. Without a mask, all keys are seen. `dropout` has factors
    of the weights.
    """
    return _attend(queries, keys, values, mask, dropout)


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, mask: Array | None, dropout: Array | None) -> Array:
    return _forward(q, k, v, mask, dropout)[0]


def _forward(
    q: Array, k: Array, v: Array, mask: Array | None, dropout: Array | None
) -> tuple[Array, tuple]:
    logits = einsum("...qk,...sk->...qs", q, k)
    if mask is not None:
        # The mask gets the axes of the logits: its shape becomes [*B, 1, 1, S] or [*B, 1, Q, S].
        mask = mask[..., None, :, :] if mask.ndim == q.ndim - 1 else mask[..., None, None, :]
        logits = jnp.where(mask, logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    kept = weights if dropout is None else weights * dropout.astype(v.dtype)
    y = einsum("...qs,...sk->...qk", kept, v).astype(v.dtype)
    return y, (q, k, v, weights, dropout, y)


def _backward(residuals: tuple, gradient: Array) -> tuple:
    q, k, v, weights, dropout, y = residuals
    mean = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)
    d_weights, kept = einsum("...qk,...sk->...qs", gradient, v), weights
    if dropout is not None:
        d_weights, kept = d_weights * dropout, weights * dropout.astype(weights.dtype)
    d_logits = (weights * (d_weights - mean)).astype(q.dtype)
    d_q = einsum("...qs,...sk->...qk", d_logits, k).astype(q.dtype)
    d_k = einsum("...qs,...qk->...sk", d_logits, q).astype(k.dtype)
    d_v = einsum("...qs,...qk->...sk", kept, gradient).astype(v.dtype)
    no_gradient = None if dropout is None else jnp.zeros_like(dropout)
    return d_q, d_k, d_v, None, no_gradient


_attend.defvjp(_forward, _backward)
