"""Attention to a memory of past tokens (Memorizing Transformers, section 3).

Each head of a query searches for the few remembered keys with the largest products and attends to
these alone. The memory is a constant: gradients reach the queries only.

In shapes, M is the number of tokens of the memory, R the number of neighbours of a query, and Q the
number of queries. Heads come before tokens, because every head is searched separately.
"""

import jax
from jaxtyping import Array, Float, Int

from brt.memories.memorizing.memory_attention import reference, xla
from brt.memories.memorizing.memory_attention.retrieval import Search
from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op

OP = Op(
    "memory_attention",
    (
        Implementation("xla", xla.memory_attention),
        Implementation("reference", reference.memory_attention, auto=()),
    ),
)


def memory_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B H Z K"],
    values: Float[Array, "B H Z K"],
    counts: Int[Array, "B N"],
    *,
    size: int,
    neighbors: int,
    search: Search = "exact",
    null_keys: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Attends from the tokens of every block to their neighbours in the past.

    The queries are those of N blocks of W = T / N tokens. Block n sees the M tokens before it,
    which begin at n * W of `keys`: the memory comes first, then the segment, as far as later blocks
    read it. With one block, `keys` may be the memory alone.

    Apart from the arguments, each lane holds at once `xla.AT_ONCE` float32 scores (or those of one
    query in all heads, if these are more), as many retrieved numbers, and the indices [H, T, R] of
    neighbours. The same holds for the backward pass.

    Args:
      queries: already multiplied by any scale; a positive scale does not change the neighbours.
      keys, values: the oldest first.
      counts: the number of the M tokens before a block, counted from the end, that may be
        neighbours.
      size: M.
      neighbors: R.
      search: see `retrieval`; "bucketed" needs M to be a multiple of R.
      null_keys: True makes missing neighbours count as zero keys with zero values instead of being
        ignored, as the original code does.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The outputs in the dtype of `values`, with the softmax in float32. Zeros where a query has no
        neighbours.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    keys, values = jax.lax.stop_gradient((keys, values))
    return dispatch.run(
        OP, implementation, queries, keys, values, counts,
        size=size, neighbors=neighbors, search=search, null_keys=null_keys,
    )  # fmt: skip
