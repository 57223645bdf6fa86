"""Kinds of attention and inputs for `clustered.py`, which compares their times and errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Attention
from brt.layers.attention_kinds import attend
from brt.ops.causal_clustered_attention import (
    CentroidMemory,
    Centroids,
    causal_clustered_attention,
    memory_scan,
)
from brt.ops.window_attention import window_part

HEADS, WIDTH, WINDOW = 4, 64, 256
REGIMES = ("random", "tight", "loose", "sharp", "retrieval")
# These kinds compute all logits at once.
ALL_LOGITS = ("full", "oracle_top_k", "sdpa", "sdpa, causal")

Operation = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def operations(clusters: int, top_k: int) -> dict[str, Operation]:
    """Returns the kinds of attention, as functions of [1, T, H, K] queries, keys and values."""
    sizes = {"clusters": clusters, "top_k": top_k}
    return {
        "sdpa": jax.nn.dot_product_attention,
        "full": plain,
        "clustered": of("clustered", **sizes),
        "improved_clustered": of("improved_clustered", **sizes),
        "reformer, 1 round": of("reformer"),
        "reformer, 4 rounds": of("reformer", rounds=4),
        "oracle_top_k": of("oracle_top_k", top_k=top_k),
        "sdpa, causal": partial(jax.nn.dot_product_attention, is_causal=True),
        "causal clustered": partial(causal, clusters=64, top_k=16),
    }


def of(kind: str, **settings: Any) -> Operation:
    """Returns a kind of attention of encoders, with settings of the config section Attention."""
    return partial(_attend, config=Attention(kind=kind, **settings))


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, config: Attention) -> jax.Array:
    return attend(q, k, v, jnp.ones(q.shape[:2], bool), config, jax.random.key(0))


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Computes full attention with two products and a softmax, which are not fused."""
    logits = jnp.einsum("bqhk,bshk->bhqs", q * WIDTH**-0.5, k)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(logits), v)


def causal(q: jax.Array, k: jax.Array, v: jax.Array, clusters: int, top_k: int) -> jax.Array:
    """Computes a decoder's causal clustered attention.

    Attention is exact within a window. To earlier keys, it is computed through centroids.

    Args:
      q, k, v: [1, T, H, K] queries, keys and values.
      clusters: number of centroids of each head.
      top_k: number of keys that each centroid keeps.
    """
    q = q * WIDTH**-0.5
    before = ((0, 0), (WINDOW, 0), (0, 0), (0, 0))
    window_keys, cached = (k, v), (jnp.zeros_like(k[:, :WINDOW]),) * 2
    k, v = jnp.pad(k, before), jnp.pad(v, before)
    cache_mask = jnp.arange(q.shape[1] // WINDOW)[None] > 0
    vectors = jax.random.normal(jax.random.key(1), (HEADS, clusters, WIDTH)) * WIDTH**-0.5
    centroids = Centroids(vectors, jnp.zeros((HEADS, clusters)))
    best = jnp.zeros((1, HEADS, clusters, top_k, WIDTH))
    past = CentroidMemory(best, best, best[..., 0, :], best[..., 0, 0], jnp.zeros((1,), jnp.int32))
    _, pasts = memory_scan(k, v, cache_mask, past, centroids)
    window = window_part(q, cached, *window_keys, None, cache_mask)
    bias = jnp.zeros((HEADS,))
    return causal_clustered_attention(q, window, k, v, cache_mask, pasts, centroids, bias)


def regime(name: str, tokens: int) -> tuple[jax.Array, ...]:
    """Returns random queries, keys and values, float32 [1, T, H, K].

    Args:
      name: distribution of the queries:
        random: independent normal queries.
        tight: normal noise around 50 normal modes; the noise is 0.1 times as large as the modes.
        loose: as `tight`, but the noise is half as large as the modes.
        sharp: as `tight`, but the noise is 0.3 times as large as the modes, and the queries are
          multiplied by 3, so that few keys have most of the weight.
        retrieval: each query is near another key.
      tokens: T.
    """
    draw = np.random.default_rng(0)
    q, k, v = draw.normal(size=(3, 1, tokens, HEADS, WIDTH))
    modes = draw.normal(size=(1, 50, HEADS, WIDTH))
    around = {"tight": (0.1, 1), "loose": (0.5, 1), "sharp": (0.3, 3)}
    if name in around:
        noise, length = around[name]
        q = length * (modes[:, draw.integers(50, size=tokens)] + noise * q)
    elif name == "retrieval":
        q = 1.5 * k[:, draw.permutation(tokens)] + 0.3 * q
    return tuple(jnp.asarray(a, jnp.float32) for a in (q, k, v))
