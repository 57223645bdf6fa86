"""A wrapper for implementations of attention that take cached and new keys as one array."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from brt.ops.normalization import l2_normalize, scaled_unit


def with_joined_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of `function` that takes the cached keys and values as separate arrays.

    The returned function also normalizes queries and keys if a scale is passed.
    """

    def attend_to_joined_keys(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        *others: Any, scale: Array | None, **options: Any,
    ) -> Any:  # fmt: skip
        keys, values = (
            jnp.concatenate(pair, axis=1) for pair in zip(cached, (keys, values), strict=True)
        )
        if scale is not None:
            queries, keys = scaled_unit(queries, scale), l2_normalize(keys)
        return function(queries, keys, values, *others, **options)

    return attend_to_joined_keys
