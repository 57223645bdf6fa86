"""The meaning of the baselines: all T x X logits, most of them masked."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.masked_attention import masked_softmax


def full(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    *,
    scale: float,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    """See `exact.full`."""
    seen = _seen(valid, queries.shape[1], causal)
    return _attend(scale * _logits(queries, keys), values, seen)


def oracle_top_k(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    *,
    count: int,
    scale: float,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    """See `exact.oracle_top_k`: a key is kept if fewer than `count` are better."""
    seen = _seen(valid, queries.shape[1], causal)
    logits = scale * _logits(queries, keys)
    better = (logits[..., None, :] > logits[..., :, None]) & seen[..., None, :]
    return _attend(logits, values, seen & (jnp.sum(better, axis=-1) < count))


def attend_in_chunks(
    queries: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    valid: Bool[Array, "B T"],
    ids: Int[Array, "R B H T"],
    *,
    chunk: int,
    scale: float,
    attend_to_self: bool = True,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    """See `reformer.attend_in_chunks`: a token's chunk follows from how many come before it."""
    place = jnp.arange(queries.shape[1])
    own = (place[:, None] == place[None])[None, None]
    earlier = (place[None] < place[:, None])[None, None]
    keys = queries / jnp.sqrt(jnp.sum(queries**2, axis=-1, keepdims=True) + 1e-6)
    logits = scale * _logits(queries, keys)
    if not attend_to_self:
        logits = jnp.where(own, -1e9, logits)
    rounds = []
    for of_round in ids:
        mine, other = of_round[..., :, None], of_round[..., None, :]
        rank = jnp.sum((other < mine) | ((other == mine) & earlier), axis=-1)
        chunks_back = rank[..., :, None] // chunk - rank[..., None, :] // chunk
        seen = _seen(valid, len(place), causal) & ((chunks_back == 0) | (chunks_back == 1))
        rounds.append(_attend(logits, values, seen))
    return jnp.mean(jnp.stack(rounds), axis=0)


def _logits(
    queries: Float[Array, "B T H K"], keys: Float[Array, "B X H K"]
) -> Float[Array, "B H T X"]:
    return jnp.einsum("bqhk,bshk->bhqs", queries, keys, preferred_element_type=jnp.float32)


def _seen(valid: Bool[Array, "B X"], tokens: int, causal: bool) -> Bool[Array, "B 1 T X"]:
    seen = jnp.broadcast_to(valid[:, None, None], (len(valid), 1, tokens, valid.shape[1]))
    return jnp.tril(seen) if causal else seen


def _attend(
    logits: Float[Array, "B H T X"], values: Float[Array, "B X H K"], seen: Bool[Array, "B #H T X"]
) -> Float[Array, "B T H K"]:
    weights = masked_softmax(logits, seen).astype(values.dtype)
    return jnp.einsum("bhqs,bshk->bqhk", weights, values)
