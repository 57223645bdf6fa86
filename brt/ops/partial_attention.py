"""Softmax attention to a subset of the keys, and the combination of several such results.

Attention to the window and attention to a memory, for example, are computed separately. The
log-sum-exps of both then tell how to weight their outputs, so that the combination equals one
softmax over all keys.

In shapes, Q is the number of queries, S of keys of the subset, and K of numbers of a value; *B
stands for any leading axes, such as the rows of the batch and the heads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dropout import Dropout
from brt.ops.products import matmul_nn, matmul_nt, matmul_tn
from brt.ops.softmax import FLOOR


class AttentionPart(NamedTuple):
    """The result of attention to a subset of the keys.

    Attributes:
      output: [*B, K], the weighted mean of the subset's values.
      lse: float32 [*B], the log-sum-exp of the subset's logits, which determines the weight of this
        subset among others; `softmax.FLOOR` (-1000) where no key is visible.
    """

    output: Float[Array, "*B K"]
    lse: Float[Array, "*B"]


@jax.custom_vjp
def attend_to_part(
    logits: Float[Array, "*B Q S"],
    values: Float[Array, "*B S K"],
    dropout: Dropout | None = None,
) -> AttentionPart:
    """Returns the attention output over a subset of the keys and the log-sum-exp of the logits,
    both float32.

    The backward pass needs, for each query, the sum over the keys of the weight times the weight's
    gradient. This sum equals the dot product of the output and the output's gradient, so the
    backward pass need not read all weights for it.

    Args:
      logits: float32, with the value `softmax.MASKED` where a query must not see a key.
      values: the values of the keys.
      dropout: dropout of the attention weights; None for no dropout.
    """
    return _forward(logits, values, dropout)[0]


def _forward(logits: Array, values: Array, dropout: Dropout | None) -> tuple[AttentionPart, tuple]:
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), FLOOR)
    weights = jnp.exp(logits - top)
    sums = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(FLOOR - top)
    read = matmul_nn(_dropped_weights(weights, values, dropout), values) / sums
    part = AttentionPart(read, (top + jnp.log(sums))[..., 0])
    return part, (weights, sums, values, dropout, read)


def _backward(residuals: tuple, gradient: AttentionPart) -> tuple[Array, Array, None]:
    weights, sums, values, dropout, read = residuals
    d_read = gradient.output / sums
    d_weights = matmul_nt(d_read.astype(values.dtype), values)
    if dropout is not None:
        d_weights *= dropout.factors(weights.shape, weights.dtype)
    # XLA's CPU backend takes six times as long for an elementwise product followed by a sum as for
    # this einsum.
    along = jnp.einsum("...k,...k->...", d_read, read)[..., None]
    along -= gradient.lse[..., None] / sums
    d_values = matmul_tn(_dropped_weights(weights, values, dropout), d_read.astype(values.dtype))
    return weights * (d_weights - along), d_values.astype(values.dtype), None


def _dropped_weights(weights: Array, values: Array, dropout: Dropout | None) -> Array:
    weights = weights.astype(values.dtype)
    return weights if dropout is None else dropout(weights)


attend_to_part.defvjp(_forward, _backward)


def merge_parts(parts: Sequence[AttentionPart]) -> AttentionPart:
    """Returns the result of one softmax over all keys, computed from the results of attention to
    disjoint subsets of the keys.

    The output and the log-sum-exp are float32. The axes of the parts are broadcast against each
    other.
    """
    lse = jnp.stack(jnp.broadcast_arrays(*(part.lse for part in parts)))
    weights = jax.nn.softmax(lse, axis=0)[..., None]
    output = sum(w * part.output for w, part in zip(weights, parts, strict=True))
    return AttentionPart(output, jax.nn.logsumexp(lse, axis=0))
