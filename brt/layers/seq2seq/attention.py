"""Causal self-attention of the decoder.

In shapes, B is the number of sources, N of beams of a source, and T of target tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.layers.transformer.attention import Projections


class SelfCache(NamedTuple):
    """Keys and values of the target tokens that were read so far, for each of N beams. The cache of
    a whole decoder has its L layers on axis 1.
    """

    keys: Float[Array, "B *L N T H K"]
    values: Float[Array, "B *L N T H K"]


class DecoderAttention(Projections):
    """Causal self-attention: every target token attends to itself and the tokens before it."""

    def __call__(
        self, x: Float[Array, "B T D"], bias: Float[Array, "H T T"] | None
    ) -> Float[Array, "B T D"]:
        seen = jnp.asarray(np.tri(x.shape[1], dtype=bool))[None]
        y = self.attend(self.queries(x), self.k(x), self.v(x), bias, seen, self.drop())
        return self.o(y)

    def step(
        self,
        x: Float[Array, "B N D"],
        cache: SelfCache,
        position: Int[Array, ""],
        bias: Float[Array, "H 1 T"] | None,
    ) -> tuple[Float[Array, "B N D"], SelfCache]:
        """Reads the token of every beam at `position`; the cache has the tokens before it."""

        def with_token(past: Array, new: Float[Array, "B N H K"]) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(
                past, new[:, :, None].astype(past.dtype), position, axis=2
            )

        cache = SelfCache(with_token(cache.keys, self.k(x)), with_token(cache.values, self.v(x)))
        seen = (jnp.arange(cache.keys.shape[2]) <= position)[None, None, None]
        y = self.attend(self.queries(x)[:, :, None], cache.keys, cache.values, bias, seen)
        return self.o(y[:, :, 0]), cache
