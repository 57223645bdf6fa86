"""A wrapper for implementations of attention that take cached and new keys as one array, because
callers pass the two as separate arrays.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from brt.ops.normalization import l2_normalize, scaled_unit


def with_joined_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of `function` that takes the cached keys and values as separate arrays.

    The returned function also normalizes queries and keys if a scale is passed.

    Args:
      function: an implementation of attention with the arguments (queries, keys, values, *others),
        where `keys` and `values` begin with those of the cache.
    """

    def attend_to_joined_keys(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        *others: Any, scale: Array | None, **options: Any,
    ) -> Any:  # fmt: skip
        """Returns the result of `function` for the concatenation of cached and new keys and values.

        Args:
          queries: the queries [B, T, H, K] of T tokens in B rows, for H heads of K numbers.
          cached: the keys and values of the tokens before the segment.
          keys, values: the keys and values of the segment; tokens are on axis 1.
          others: further arguments of `function`.
          scale: [H]; if not None, the keys are first scaled to norm 1, and the queries of head h to
            norm scale[h].
          options: keyword arguments of `function`.
        """
        keys, values = (
            jnp.concatenate(pair, axis=1) for pair in zip(cached, (keys, values), strict=True)
        )
        if scale is not None:
            queries, keys = scaled_unit(queries, scale), l2_normalize(keys)
        return function(queries, keys, values, *others, **options)

    return attend_to_joined_keys
