"""Attention to a part of the keys, and the parts as one softmax."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dropout import Dropout
from brt.ops.products import combined, inner, weighted_rows
from brt.ops.softmax import FLOOR


class Part(NamedTuple):
    """What queries read from some of the keys.

    Attributes:
      values: [*B, K].
      totals: float32 [*B], the logarithm of the sum of exp(logit): what the part weighs.
        `softmax.FLOOR` where there is no key.
    """

    values: Float[Array, "*B K"]
    totals: Float[Array, "*B"]


@jax.custom_vjp
def attend_to_part(
    logits: Float[Array, "*B Q S"],
    values: Float[Array, "*B S K"],
    dropout: Dropout | None = None,
) -> Part:
    """Float32 logits, MASKED where a key is not seen; read values are float32.

    The backward pass needs no second look at the weights for the sum that softmax subtracts:
    it is the product of what was read and its gradient.
    """
    return _forward(logits, values, dropout)[0]


def _forward(logits: Array, values: Array, dropout: Dropout | None) -> tuple[Part, tuple]:
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), FLOOR)
    weights = jnp.exp(logits - top)
    sums = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(FLOOR - top)
    read = combined(_kept(weights, values, dropout), values) / sums
    part = Part(read, (top + jnp.log(sums))[..., 0])
    return part, (weights, sums, values, dropout, read)


def _backward(saved: tuple, gradient: Part) -> tuple[Array, Array, None]:
    weights, sums, values, dropout, read = saved
    d_read = gradient.values / sums
    d_weights = inner(d_read.astype(values.dtype), values)
    if dropout is not None:
        d_weights *= dropout.factors(weights.shape, weights.dtype)
    # As a product: XLA's CPU backend takes six times as long to multiply and sum up.
    along = jnp.einsum("...k,...k->...", d_read, read)[..., None]
    along -= gradient.totals[..., None] / sums
    d_values = weighted_rows(_kept(weights, values, dropout), d_read.astype(values.dtype))
    return weights * (d_weights - along), d_values.astype(values.dtype), None


def _kept(weights: Array, values: Array, dropout: Dropout | None) -> Array:
    weights = weights.astype(values.dtype)
    return weights if dropout is None else dropout(weights)


attend_to_part.defvjp(_forward, _backward)


def merged(parts: Sequence[Part]) -> Part:
    """One softmax over the keys of all parts, whose axes broadcast; float32."""
    totals = jnp.stack(jnp.broadcast_arrays(*(part.totals for part in parts)))
    weights = jax.nn.softmax(totals, axis=0)[..., None]
    values = sum(w * part.values for w, part in zip(weights, parts, strict=True))
    return Part(values, jax.nn.logsumexp(totals, axis=0))
