"""Attention to a memory of past tokens (Memorizing Transformers, section 3).

For each head of a query, a search selects the few keys of the memory with the largest products with
the query. These keys are the query's neighbours, and the query attends to its neighbours alone. The
memory gets no gradient: gradients reach the queries only.

In shapes, M is the number of tokens of the memory, R of neighbours of a query, and Z of keys of the
memory and the segment. Heads come before tokens in keys and values, because every head is searched
separately. Each of G heads of keys serves H / G consecutive heads of queries. The other letters of
shapes are those of `brt.layers.state`.
"""

import jax
from jaxtyping import Array, Float, Int

from brt.memories.memorizing.memory_attention import reference, xla
from brt.memories.memorizing.memory_attention.retrieval import Search
from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.grouped_heads import heads_to_tokens, tokens_to_heads

OP = Op(
    "memory_attention",
    (
        Implementation("xla", xla.memory_attention),
        Implementation("reference", reference.memory_attention, auto=()),
    ),
)


def memory_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B G Z K"],
    values: Float[Array, "B G Z K"],
    counts: Int[Array, "B N"],
    *,
    size: int,
    neighbors: int,
    search: Search = "exact",
    null_keys: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every token over its neighbours in the memory, in the dtype
    of `values`; zeros where a query has no neighbours.

    The queries belong to N blocks of W = T / N tokens. A block sees the M tokens before the block.
    `keys` has the memory before the segment, followed by the segment's tokens, so the tokens that
    block n sees begin at index n * W. With one block, `keys` may be the memory alone.

    For each row of the batch, the temporary arrays have at most `xla.AT_ONCE` float32 scores (or
    the scores of one query in all heads, if these are more), the same number of elements of
    retrieved keys and of values, and the indices [H, T, R] of neighbours. The limit also holds for
    the backward pass.

    Args:
      queries: the queries, already scaled. A positive scale does not change the neighbours.
      keys, values: the keys and values, oldest token first.
      counts: for each block, the number of tokens that may be neighbours, at most M. These are the
        last tokens before the block.
      size, neighbors: M and R.
      search: "exact" finds the keys with the largest products. "bucketed" divides the tokens among
        R buckets and finds the best key of each bucket, for which M must be a multiple of R.
      null_keys: True makes missing neighbours count as zero keys with zero values instead of being
        ignored, as the original code does.
      implementation: None selects the best implementation that supports the inputs.
    """
    keys, values = jax.lax.stop_gradient((keys, values))
    heads = queries.shape[2]
    found = dispatch.run(
        OP, implementation, heads_to_tokens(queries, keys.shape[1]), keys, values, counts,
        window=queries.shape[1] // counts.shape[1], size=size, neighbors=neighbors, search=search,
        null_keys=null_keys,
    )  # fmt: skip
    return tokens_to_heads(found, heads)
