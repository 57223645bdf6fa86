"""Attention to a part of the keys, and the parts as one softmax."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.softmax import safe_softmax_with_total


class Part(NamedTuple):
    """What queries read from some of the keys.

    Attributes:
      values: [*B, K].
      totals: float32 [*B], the logarithm of the sum of exp(logit): what the part weighs.
        `softmax.FLOOR` where there is no key.
    """

    values: Float[Array, "*B K"]
    totals: Float[Array, "*B"]


def attend_to_part(logits: Float[Array, "*B Q S"], values: Float[Array, "*B S K"]) -> Part:
    """Float32 logits, MASKED where a key is not seen; read values are float32."""
    weights, totals = safe_softmax_with_total(logits)
    read = jnp.einsum(
        "...qs,...sk->...qk", weights.astype(values.dtype), values,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return Part(read, totals)


def merged(parts: Sequence[Part]) -> Part:
    """One softmax over the keys of all parts, whose axes broadcast; float32."""
    totals = jnp.stack(jnp.broadcast_arrays(*(part.totals for part in parts)))
    weights = jax.nn.softmax(totals, axis=0)[..., None]
    values = sum(w * part.values for w, part in zip(weights, parts, strict=True))
    return Part(values, jax.nn.logsumexp(totals, axis=0))
