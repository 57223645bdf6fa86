"""Oracle top-k and Reformer's attention, with all T x X logits, most of them masked."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.masked_attention import valid_mask
from brt.ops.softmax import masked_softmax


def oracle_top_k(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    dropout: None = None,
    *,
    count: int,
    scale: float,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    mask = valid_mask(valid, queries.shape[1], causal)[:, None]
    logits = scale * _logits(queries, keys)
    better = (logits[..., None, :] > logits[..., :, None]) & mask[..., None, :]
    return _attend(logits, values, mask & (jnp.sum(better, axis=-1) < count))


def attend_in_chunks(
    queries: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    valid: Bool[Array, "B T"],
    ids: Int[Array, "R B H T"],
    dropout: None = None,
    *,
    chunk: int,
    scale: float,
    attend_to_self: bool = True,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    place = jnp.arange(queries.shape[1])
    own = (place[:, None] == place[None])[None, None]
    earlier = (place[None] < place[:, None])[None, None]
    keys = queries / jnp.sqrt(jnp.sum(queries**2, axis=-1, keepdims=True) + 1e-6)
    logits = scale * _logits(queries, keys)
    if not attend_to_self:
        logits = jnp.where(own, -1e9, logits)
    rounds = []
    for round_ids in ids:
        bucket, other = round_ids[..., :, None], round_ids[..., None, :]
        # The tokens are not sorted. The number of tokens before a token in the order of buckets
        # determines its chunk.
        rank = jnp.sum((other < bucket) | ((other == bucket) & earlier), axis=-1)
        chunks_back = rank[..., :, None] // chunk - rank[..., None, :] // chunk
        near = (chunks_back == 0) | (chunks_back == 1)
        mask = valid_mask(valid, len(place), causal)[:, None] & near
        rounds.append(_attend(logits, values, mask))
    return jnp.mean(jnp.stack(rounds), axis=0)


def _logits(
    queries: Float[Array, "B T H K"], keys: Float[Array, "B X H K"]
) -> Float[Array, "B H T X"]:
    return jnp.einsum("bqhk,bshk->bhqs", queries, keys, preferred_element_type=jnp.float32)


def _attend(
    logits: Float[Array, "B H T X"], values: Float[Array, "B X H K"], mask: Bool[Array, "B #H T X"]
) -> Float[Array, "B T H K"]:
    weights = masked_softmax(logits, mask).astype(values.dtype)
    return jnp.einsum("bhqs,bshk->bqhk", weights, values)
