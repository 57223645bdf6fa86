"""A wrapper of implementations that read cached and new keys as one array."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from brt.ops.normalization import l2_normalize, scaled_unit


def with_joined_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an implementation that reads cached and new keys as one array.

    The wrapper also normalizes queries and keys if a scale is passed.
    """

    def attend_to_joined_keys(
        queries: Array, cached: tuple[Array, Array], keys: Array, values: Array,
        *others: Any, scale: Array | None, **options: Any,
    ) -> Any:  # fmt: skip
        """Returns the result of `function`, which takes one array of keys and one array of values.

        The cached keys and the keys of the segment are concatenated, and so are the values. With a
        scale, queries and keys are normalized first.
        """
        keys, values = (
            jnp.concatenate(pair, axis=1) for pair in zip(cached, (keys, values), strict=True)
        )
        if scale is not None:
            queries, keys = scaled_unit(queries, scale), l2_normalize(keys)
        return function(queries, keys, values, *others, **options)

    return attend_to_joined_keys
