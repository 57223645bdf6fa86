"""Summary vectors of a block: learned weighted sums over its positions (MELODI, arXiv 2410.03156).

The inputs are the W tokens of a block and the U summaries of the same tokens by the layer below.

In shapes, B is the number of rows of the batch, D of numbers of a vector, P = W + U of input
positions, and O of weighted sums.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.normalization import rms_norm
from brt.ops.products import einsum_float32


class MixWeights(NamedTuple):
    """Weights of the mixture of P input positions to O vectors.

    Attributes:
      kernel: [P, O], the weight of each input position in each weighted sum.
      bias: [O], a number that is added to all features of each weighted sum.
      token_norm, summary_norm: [D], the scales of the norms of tokens and of summaries; both None
        for a mixture without norms and without a residual connection.
    """

    kernel: Float[Array, "P O"]
    bias: Float[Array, " O"]
    token_norm: Float[Array, " D"] | None = None
    summary_norm: Float[Array, " D"] | None = None


def mix_tokens(
    tokens: Float[Array, "B W D"], summaries: Float[Array, "B U D"], weights: MixWeights
) -> Float[Array, "B O D"]:
    """Returns O weighted sums over the tokens and summaries of a block, in float32.

    If the weights have norms, the inputs are normalized first, and the summaries are added to the
    result, so that O must equal U.

    Args:
      tokens: the vectors of the W tokens.
      summaries: the summaries of the block by the layer below.
      weights: the weights of the sums, and the scales of the norms.
    """
    mixed = tokens, summaries
    if weights.token_norm is not None:
        mixed = rms_norm(tokens, weights.token_norm), rms_norm(summaries, weights.summary_norm)
    z = jnp.concatenate(mixed, axis=1)
    product = einsum_float32("bpd,po->bod", z, weights.kernel.astype(z.dtype))
    y = product + weights.bias[None, :, None]
    return y if weights.token_norm is None else y + summaries
