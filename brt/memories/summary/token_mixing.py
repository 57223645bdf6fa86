"""Summary vectors of a block: learned weighted sums over its positions (MELODI, arXiv 2410.03156).

The inputs are the tokens of a window and the summaries that the layer below made of the same
tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.normalization import rms_norm
from brt.ops.products import einsum_float32


class MixWeights(NamedTuple):
    """Weights of a token mixing layer.

    Attributes:
      kernel: [W+U, O], the weight of each input position in each output.
      bias: [O].
      token_norm, summary_norm: [D], scales of the norms of the inputs, or both None for a layer
        without norms and residual connection.
    """

    kernel: Float[Array, "P O"]
    bias: Float[Array, " O"]
    token_norm: Float[Array, " D"] | None = None
    summary_norm: Float[Array, " D"] | None = None


def mix_tokens(
    tokens: Float[Array, "B W D"], summaries: Float[Array, "B U D"], weights: MixWeights
) -> Float[Array, "B O D"]:
    """Returns O weighted sums over the tokens and summaries, with float32 sums.

    With norms, the inputs are normalized first and the summaries are added to the result.
    """
    mixed = tokens, summaries
    if weights.token_norm is not None:
        mixed = rms_norm(tokens, weights.token_norm), rms_norm(summaries, weights.summary_norm)
    z = jnp.concatenate(mixed, axis=1)
    product = einsum_float32("bpd,po->bod", z, weights.kernel.astype(z.dtype))
    y = product + weights.bias[None, :, None]
    return y if weights.token_norm is None else y + summaries
