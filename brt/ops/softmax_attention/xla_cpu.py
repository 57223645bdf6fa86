"""Softmax attention over all keys for XLA's CPU backend, with logits as [keys, queries].

With this layout the maximum over the keys is taken over a column, and many columns are processed
side by side. All six matrix products multiply matrices that are stored row by row, because XLA's
CPU backend takes up to twice as long if one of them is stored column by column. For this purpose,
arrays with an axis of K numbers are transposed in memory, but never logits. A column of ones in the
values computes the sums of the weights.
The weights exp(logits - maximum), which are saved for the backward pass, are never divided by their
sums. Instead, the output and its gradient are divided, which is cheaper.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.layout import transposed
from brt.ops.products import matmul_nn
from brt.ops.softmax import MASKED


@jax.custom_vjp
def attend(
    q: Float[Array, "*B H Q K"],
    k: Float[Array, "*B H S K"],
    v: Float[Array, "*B H S K"],
    mask: Bool[Array, "B S"] | None,
) -> Float[Array, "*B H Q K"]:
    """Returns the attention of every query to the keys where the mask is True.

    Every query must see at least one key. Without a mask, all keys are seen.
    """
    return _forward(q, k, v, mask)[0]


def _forward(q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, tuple]:
    logits = matmul_nn(k, transposed(q))
    if mask is not None:
        logits = jnp.where(mask[:, None, :, None], logits, MASKED)
    top = jnp.max(logits, axis=-2, keepdims=True)
    weights = jnp.exp(logits - top).astype(v.dtype)
    values_and_ones = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    products = matmul_nn(transposed(values_and_ones), weights)
    total = products[..., -1:, :]
    y = transposed((products[..., :-1, :] / total).astype(v.dtype))
    return y, (q, k, v, weights, total, y)


def _backward(residuals: tuple, gradient: Array) -> tuple:
    q, k, v, weights, total, y = residuals
    scaled = gradient.astype(jnp.float32) / total.swapaxes(-1, -2)
    mean = jnp.sum(scaled * y.astype(jnp.float32), axis=-1)[..., None, :]
    scaled = jax.lax.optimization_barrier(scaled.astype(q.dtype))
    d_logits = (weights * (matmul_nn(v, transposed(scaled)) - mean)).astype(q.dtype)
    d_q = transposed(matmul_nn(transposed(k), d_logits))
    d_k, d_v = matmul_nn(d_logits, q), matmul_nn(weights, scaled)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


attend.defvjp(_forward, _backward)
