"""Learned weighted sums over the positions of a block, which summarise the block (MELODI, arXiv
2410.03156).

The inputs are the vectors of the W tokens of a block, and the U vectors with which the layer below
has summarised the same tokens. In shapes, P = W + U, and O is the number of weighted sums. The
other letters of shapes are those of `brt.layers.state`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.normalization import rms_norm
from brt.ops.products import einsum_float32


class MixWeights(NamedTuple):
    """Weights of O weighted sums over P input positions; norms imply a residual connection."""

    kernel: Float[Array, "P O"]
    bias: Float[Array, " O"]
    token_norm: Float[Array, " D"] | None = None
    summary_norm: Float[Array, " D"] | None = None


def mix_tokens(
    tokens: Float[Array, "B W D"], summaries: Float[Array, "B U D"], weights: MixWeights
) -> Float[Array, "B O D"]:
    """Returns O weighted sums over the tokens and summaries of a block, in float32.

    If the weights have norms, the inputs are normalized first, and the summaries are added to the
    result, so O must equal U.
    """
    mixed = tokens, summaries
    if weights.token_norm is not None:
        mixed = rms_norm(tokens, weights.token_norm), rms_norm(summaries, weights.summary_norm)
    z = jnp.concatenate(mixed, axis=1)
    product = einsum_float32("bpd,po->bod", z, weights.kernel.astype(z.dtype))
    y = product + weights.bias[None, :, None]
    return y if weights.token_norm is None else y + summaries
