"""Softmax attention to a subset of the keys, and the combination of several such results.

For example, attention to the window and attention to a memory each have an output and a
log-sum-exp. The log-sum-exps tell how to weight the outputs, so that the combination equals one
softmax over all keys.
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
    """The result of attention to a subset of the keys."""

    output: Float[Array, "*B K"]  # the weighted mean of the subset's values
    # The float32 log-sum-exp of the subset's logits; `softmax.FLOOR` (-1000) where no key is
    # visible. It determines the weight of this subset among others.
    lse: Float[Array, "*B"]


@jax.custom_vjp
def attend_to_part(
    logits: Float[Array, "*B Q S"],
    values: Float[Array, "*B S K"],
    dropout: Dropout | None = None,
) -> AttentionPart:
    """Returns the float32 attention with given logits to a subset of the keys.

    The logits are float32, with the value `softmax.MASKED` where a query must not see a key.
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
    # The softmax's gradient needs, for each query, the sum over the keys of the weight times the
    # weight's gradient. This sum equals the dot product of the output and the output's gradient,
    # which reads no weights. On CPUs, an elementwise product and a sum would take six times as long
    # as this einsum.
    mean = jnp.einsum("...k,...k->...", d_read, read)[..., None]
    mean -= gradient.lse[..., None] / sums
    d_values = matmul_tn(_dropped_weights(weights, values, dropout), d_read.astype(values.dtype))
    return weights * (d_weights - mean), d_values.astype(values.dtype), None


def _dropped_weights(weights: Array, values: Array, dropout: Dropout | None) -> Array:
    weights = weights.astype(values.dtype)
    return weights if dropout is None else dropout(weights)


attend_to_part.defvjp(_forward, _backward)


def merge_parts(parts: Sequence[AttentionPart]) -> AttentionPart:
    """Returns the float32 attention to all keys, from the parts of disjoint subsets of the keys.

    The axes of the parts are broadcast against each other.
    """
    lse = jnp.stack(jnp.broadcast_arrays(*(part.lse for part in parts)))
    weights = jax.nn.softmax(lse, axis=0)[..., None]
    output = sum(w * part.output for w, part in zip(weights, parts, strict=True))
    return AttentionPart(output, jax.nn.logsumexp(lse, axis=0))


def with_zero_values(part: AttentionPart, logits: Float[Array, "..."]) -> AttentionPart:
    """Returns `part` after an addition of keys whose values are zero to its softmax.

    `logits` is the log-sum-exp of the logits of the added keys; it is broadcast.
    """
    lse = jnp.logaddexp(part.lse, logits)
    share = jnp.exp(part.lse - lse)[..., None]
    return AttentionPart((part.output * share).astype(part.output.dtype), lse)
