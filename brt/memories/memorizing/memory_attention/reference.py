"""Reference implementation of memory attention (see `api.py`): all scores of a block at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.memories.memorizing.memory_attention.retrieval import (
    Search,
    attend_to_neighbors,
    find_neighbors,
)
from brt.ops.gathering import take


def memory_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B H Z K"],
    values: Float[Array, "B H Z K"],
    counts: Int[Array, "B N"],
    *,
    window: int,
    size: int,
    neighbors: int,
    search: Search,
    null_keys: bool,
) -> Float[Array, "B T H K"]:
    """Computes `api.memory_attention` for blocks of `window` tokens.

    If S heads of queries share a head of keys, their S queries for a token are consecutive entries
    of axis T, and T is S times the number of tokens.
    """
    blocks = counts.shape[1]
    width = queries.shape[1] // blocks
    outputs = []
    for n in range(blocks):
        q = queries[:, n * width : (n + 1) * width].swapaxes(1, 2)
        seen = slice(n * window, n * window + size)
        results = find_neighbors(
            jax.lax.stop_gradient(q), keys[:, :, seen], counts[:, n],
            neighbors=neighbors, search=search,
        )  # fmt: skip
        k, v = (take(x[:, :, seen], results.indices) for x in (keys, values))
        outputs.append(attend_to_neighbors(q, k, v, results.there, null_keys=null_keys))
    return jnp.concatenate(outputs, axis=2).swapaxes(1, 2)
