"""A few vectors made of those of a block: learned sums over its places.

MELODI's (arXiv 2410.03156), of the tokens of a window and of what was made of them below.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.normalization import rms_norm
from brt.ops.products import float32_sums


class MixWeights(NamedTuple):
    """What a mix learns.

    Attributes:
      kernel: [W+U, O], by place.
      bias: [O].
      token_norm, summary_norm: [D], or both None: then there is no residual.
    """

    kernel: Float[Array, "P O"]
    bias: Float[Array, " O"]
    token_norm: Float[Array, " D"] | None = None
    summary_norm: Float[Array, " D"] | None = None


def mix_tokens(
    tokens: Float[Array, "B W D"], summaries: Float[Array, "B U D"], weights: MixWeights
) -> Float[Array, "B O D"]:
    """Float32 sums over tokens and summaries; with norms of normalised ones, added to summaries."""
    mixed = tokens, summaries
    if weights.token_norm is not None:
        mixed = rms_norm(tokens, weights.token_norm), rms_norm(summaries, weights.summary_norm)
    z = jnp.concatenate(mixed, axis=1)
    product = float32_sums("bpd,po->bod", z, weights.kernel.astype(z.dtype))
    y = product + weights.bias[None, :, None]
    return y if weights.token_norm is None else y + summaries
