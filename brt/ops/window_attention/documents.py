"""The places at which the documents of a segment start, for kernels of window attention.

A place is the index of a token in the segment; cached tokens have negative places. A segment is
split into D parts of equal length, and each document starts at the start of a part.

In shapes, B is the number of rows of the batch, T the number of tokens of a segment, W of tokens of
a window, and N = T / W.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def with_cache_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of `function` that takes a cache mask instead of the starts of documents.

    The mask is True for each block of W tokens that may read the block before it. Kernels take the
    starts, because documents may also start inside of a block.

    Args:
      function: an implementation of window attention, whose sixth argument is the place of the
        first token of the document of each block.
    """

    def attend_to_blocks(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        bias: Array | None, cache_mask: Bool[Array, "B N"], dropout: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Returns the result of `function`, with `cache_mask` converted to the starts of documents.

        The function `api.window_part` describes the arguments.
        """
        first = document_places(cache_mask, cached[0].shape[1])
        return function(queries, cached, keys, values, bias, first, dropout, **options)

    return attend_to_blocks


def document_places(cache_mask: Bool[Array, "B N"], window: int) -> Int[Array, "B N"]:
    """Returns the place of the first token of the document of each block.

    Args:
      cache_mask: True where a block may read the block before it, so that both belong to the same
        document.
      window: W, the number of tokens of a block. The result is -W for documents that started before
        the segment, because no token of the segment sees earlier tokens.
    """
    starts = window * jnp.arange(cache_mask.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(cache_mask, -window, starts), axis=1)


def next_document_starts(
    first: Int[Array, "B D"], tokens: int, window: int, size: int
) -> Int[Array, "B E"]:
    """Returns for each group of consecutive keys the place where the next document starts, or T.

    The tokens before this place may read the keys; T means that no document starts after the keys.

    Args:
      first: for each part of the segment, the place of the first token of its document.
      tokens: T, the number of tokens of the segment.
      window: W, the number of cached tokens before the segment.
      size: the number of keys of a group. The W + T keys of the cache and of the segment are split
        into E groups.
    """
    places = jnp.arange(0, window + tokens, size, dtype=jnp.int32) - window
    later = first[:, None, :] > places[None, :, None]
    return jnp.min(jnp.where(later, first[:, None, :], tokens), axis=2, initial=tokens)
