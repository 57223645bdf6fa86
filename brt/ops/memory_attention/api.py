"""Attention over a memory of past tokens (Memorizing Transformers, section 3).

A query finds the few remembered keys that it fits best, head by head, and attends to these
alone. The memory is a constant: gradients reach the queries only.

Letters beside the glossary's: M tokens of memory, R neighbours that a query finds, Q queries.
Heads come before tokens, because every head is searched by itself.
"""

import jax
from jaxtyping import Array, Float, Int

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.memory_attention import reference, xla
from brt.ops.memory_attention.retrieval import Search

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
    """Attention of the tokens of every block to what they find in the past.

    The queries are those of N blocks of W = T / N tokens. Block n sees the M tokens before
    it, which begin at n * W of `keys`: first comes the memory, then the segment, as far as
    later blocks read it. With one block, `keys` may be the memory alone.

    Besides the arguments there exist at once, for each lane, `xla.AT_ONCE` float32 scores
    (or those of one query in all heads, if these are more), as many retrieved numbers, and
    the [H, T, R] found indices; backward as well.

    Args:
      queries: with any scale folded in; a positive one does not change what is found.
      keys, values: oldest first.
      counts: how many of the M tokens before a block may be found: the last so many.
      size: M.
      neighbors: R.
      search: see `retrieval`; "bucketed" needs M to be a multiple of R.
      null_keys: neighbours that are not there count as zero keys with zero values, instead
        of not at all (the original's behaviour).
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      In the dtype of `values`; softmax in float32. Zeros where a query finds nothing.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    keys, values = jax.lax.stop_gradient((keys, values))
    return dispatch.run(
        OP, implementation, queries, keys, values, counts,
        size=size, neighbors=neighbors, search=search, null_keys=null_keys,
    )  # fmt: skip
