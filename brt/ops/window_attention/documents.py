"""The places at which the documents of a segment start.

A place is the index of a token in the segment; cached tokens have negative places. In shapes, B is
the number of rows of the batch, T the number of tokens of a segment, and W of tokens of a window. A
segment has D parts, and each document starts at the start of a part.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def with_cache_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel that takes the places where documents start.

    The wrapped kernel takes a cache mask instead, which says for each block of W tokens whether the
    block may read the block before it.
    """

    def attend_to_blocks(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        bias: Array | None, cache_mask: Bool[Array, "B N"], dropout: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Returns the result of `function` for the arguments of `api.window_part`, which describes
        them.
        """
        first = document_places(cache_mask, cached[0].shape[1])
        return function(queries, cached, keys, values, bias, first, dropout, **options)

    return attend_to_blocks


def document_places(cache_mask: Bool[Array, "B N"], window: int) -> Int[Array, "B N"]:
    """Returns the place of the first token of the document of each block.

    Args:
      cache_mask: True where a block may read the block before it, so that both belong to the same
        document.
      window: W, the number of tokens of a block. Documents that started before the segment start at
        place -W in the result, because no token sees earlier tokens.
    """
    starts = window * jnp.arange(cache_mask.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(cache_mask, -window, starts), axis=1)


def reader_ends(first: Int[Array, "B D"], tokens: int, window: int, size: int) -> Int[Array, "B E"]:
    """Returns the end of the document of each group of keys: the place of the first token after the
    keys that belongs to another document, or T.

    Args:
      first: the place of the first token of the document of each part.
      tokens: T.
      window: W.
      size: the number of keys of a group. The W + T keys of the cache and of the segment are E
        groups.
    """
    places = jnp.arange(0, window + tokens, size, dtype=jnp.int32) - window
    later = first[:, None, :] > places[None, :, None]
    return jnp.min(jnp.where(later, first[:, None, :], tokens), axis=2, initial=tokens)
