"""The places at which the documents of a segment start, for kernels of window attention.

A place is the index of a token in the segment; cached tokens have negative places. A segment is
split into D parts of equal length, and each document starts at the start of a part.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def with_cache_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a `function` that takes starts of documents, so that it takes a cache mask."""

    def attend_to_blocks(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        bias: Array | None, cache_mask: Bool[Array, "B N"], dropout: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        first = document_places(cache_mask, cached[0].shape[1])
        return function(queries, cached, keys, values, bias, first, dropout, **options)

    return attend_to_blocks


def document_places(cache_mask: Bool[Array, "B N"], window: int) -> Int[Array, "B N"]:
    """Returns the place of the first token of the document of each block of W = `window` tokens.

    It is -W, the place of the first cached token, if the document starts before the segment.
    """
    starts = window * jnp.arange(cache_mask.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(cache_mask, -window, starts), axis=1)
