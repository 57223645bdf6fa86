"""Attention whose logits are all computed: full, with shared queries and keys, oracle top-k.

All [B, H, T, X] logits exist at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops import masked_attention
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import masked_softmax
from brt.ops.top_k import top_k


def full(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    dropout: Dropout | None = None,
    *,
    scale: float,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    """Softmax attention to all valid keys; logits are scale * q.k.

    Args:
      valid: False on padding, which nothing sees. A query that sees nothing gives zeros.
      dropout: of the weights [B, H, T, X].
      causal: a token sees no later one; T = X.
    """
    seen = _seen(valid, queries.shape[1], causal)
    return masked_attention.attend(queries * scale, keys, values, None, seen, dropout)


def shared_full(
    queries: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    valid: Bool[Array, "B T"],
    dropout: Dropout | None = None,
    *,
    scale: float,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    """`full` with the queries for keys, not normalised (section 4.1, "shared-full")."""
    return full(queries, queries, values, valid, dropout, scale=scale, causal=causal)


def oracle_top_k(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    dropout: Dropout | None = None,
    *,
    count: int,
    scale: float,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    """Softmax attention of every query to its own `count` best keys (section 4.1, "oracle-top").

    Keys that tie with the last of them are kept, so the keys' order does not matter. A row with
    no more than `count` keys in sight is read as `full` reads it, whose other arguments it shares.
    """
    seen = _seen(valid, queries.shape[1], causal)[:, None]
    logits = jnp.einsum(
        "bqhk,bshk->bhqs", queries * scale, keys, preferred_element_type=jnp.float32
    )
    ranked = jnp.where(seen, jax.lax.stop_gradient(logits), -jnp.inf)
    best, _ = top_k(ranked, min(count, keys.shape[1]))
    weights = masked_softmax(logits, seen & (ranked >= best[..., -1:])).astype(values.dtype)
    if dropout is not None:
        weights = dropout(weights)
    return jnp.einsum("bhqs,bshk->bqhk", weights, values)


def _seen(valid: Bool[Array, "B X"], tokens: int, causal: bool) -> Bool[Array, "B #T X"]:
    if not causal:
        return valid[:, None]
    return valid[:, None] & np.tri(tokens, valid.shape[1], dtype=bool)[None]
