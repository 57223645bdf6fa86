"""Reference implementation of memory attention (see `api.py`): for each block, all scores at once.

In shapes, B is the number of rows of the batch, T of queries of each head in a segment, N of blocks
of the segment, H of heads of keys, K of numbers of a head, and Z of keys of the memory and the
segment.
"""

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
    """Returns the attention output of every query over its neighbours, in the dtype of `values`.

    Args:
      queries: the queries, already scaled; the function applies no scale. If S heads of queries
        share a head of keys, their S queries for a token are consecutive entries of axis T, and T
        is S times the number of tokens.
      keys, values: the keys and values of the memory, followed by those of the segment, oldest
        token first.
      counts: for each block, the number of tokens that may be neighbours. These are the last tokens
        before the block.
      window: the number of tokens of a block.
      size: the number of tokens of the memory.
      neighbors: the number of neighbours of a query, which are the keys that a search selects.
      search: "exact" finds the keys with the largest products; "bucketed" divides the tokens among
        as many buckets as a query has neighbours, and finds the best key of each bucket.
      null_keys: True makes missing neighbours count as zero keys with zero values.
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
