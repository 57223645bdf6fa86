"""Attention to a part of the keys, and the parts as one softmax."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dropout import Dropout
from brt.ops.products import combined, inner, weighted_rows
from brt.ops.softmax import FLOOR


class AttentionPart(NamedTuple):
    """What queries read from some of the keys.

    Attributes:
      output: [*B, K].
      lse: float32 [*B], the logarithm of the sum of exp(logit): what the part weighs.
        `softmax.FLOOR` where there is no key.
    """

    output: Float[Array, "*B K"]
    lse: Float[Array, "*B"]


@jax.custom_vjp
def attend_to_part(
    logits: Float[Array, "*B Q S"],
    values: Float[Array, "*B S K"],
    dropout: Dropout | None = None,
) -> AttentionPart:
    """Float32 logits, MASKED where a key is not seen; read values are float32.

    The backward pass needs no second look at the weights for the sum that softmax subtracts:
    it is the product of what was read and its gradient.
    """
    return _forward(logits, values, dropout)[0]


def _forward(logits: Array, values: Array, dropout: Dropout | None) -> tuple[AttentionPart, tuple]:
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), FLOOR)
    weights = jnp.exp(logits - top)
    sums = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(FLOOR - top)
    read = combined(_kept(weights, values, dropout), values) / sums
    part = AttentionPart(read, (top + jnp.log(sums))[..., 0])
    return part, (weights, sums, values, dropout, read)


def _backward(saved: tuple, gradient: AttentionPart) -> tuple[Array, Array, None]:
    weights, sums, values, dropout, read = saved
    d_read = gradient.output / sums
    d_weights = inner(d_read.astype(values.dtype), values)
    if dropout is not None:
        d_weights *= dropout.factors(weights.shape, weights.dtype)
    # As a product: XLA's CPU backend takes six times as long to multiply and sum up.
    along = jnp.einsum("...k,...k->...", d_read, read)[..., None]
    along -= gradient.lse[..., None] / sums
    d_values = weighted_rows(_kept(weights, values, dropout), d_read.astype(values.dtype))
    return weights * (d_weights - along), d_values.astype(values.dtype), None


def _kept(weights: Array, values: Array, dropout: Dropout | None) -> Array:
    weights = weights.astype(values.dtype)
    return weights if dropout is None else dropout(weights)


attend_to_part.defvjp(_forward, _backward)


def merged(parts: Sequence[AttentionPart]) -> AttentionPart:
    """One softmax over the keys of all parts, whose axes broadcast; float32."""
    lse = jnp.stack(jnp.broadcast_arrays(*(part.lse for part in parts)))
    weights = jax.nn.softmax(lse, axis=0)[..., None]
    output = sum(w * part.output for w, part in zip(weights, parts, strict=True))
    return AttentionPart(output, jax.nn.logsumexp(lse, axis=0))
