"""A short causal convolution over the tokens of a document, for layers that recur over tokens.

In shapes, B is the number of rows of the batch, T of tokens of a segment, N of its blocks, H of
heads, R of channels of a head, C of tokens that the convolution reads, and L = C - 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CONVOLVED = 4  # The convolution reads this many tokens, including the token itself.


def tokens_since_start(document_start: Bool[Array, "B N"], tokens: int) -> Int[Array, "B T"]:
    """Returns, for each token of a segment, the number of earlier tokens of the token's document.

    The number is 0 for the first token of a document. If the document started before the segment,
    the number is not exact, but above T and above `CONVOLVED`.

    Args:
      document_start: True where a block is the first of a document.
      tokens: T, the number of tokens of the segment.
    """
    lanes, blocks = document_start.shape
    length = tokens // blocks
    is_start = jnp.zeros((lanes, blocks, length), bool).at[:, :, 0].set(document_start)
    places = jnp.arange(tokens)
    starts = jnp.where(is_start.reshape(lanes, tokens), places[None], -tokens - CONVOLVED)
    return places[None] - jax.lax.cummax(starts, axis=1)


def convolution(
    x: Float[Array, "B T H R"],
    earlier: Float[Array, "B L H R"],
    kernel: Float[Array, "C H R"],
    since_start: Int[Array, "B T"],
) -> tuple[Float[Array, "B T H R"], Float[Array, "B L H R"]]:
    """Returns the causal convolution of every channel over the last C tokens of its document.

    The second result has the last L inputs, which the next segment reads. That segment continues
    the last document of this one, so the inputs of earlier documents are replaced by zeros.

    Args:
      x: the inputs of the segment.
      earlier: the L inputs before the segment.
      kernel: the factors of a channel; the last one belongs to the token itself.
      since_start: the result of `tokens_since_start`.
    """
    width, tokens = len(kernel), x.shape[1]
    joined = jnp.concatenate([earlier.astype(x.dtype), x], axis=1)
    total = jnp.zeros_like(x)
    for back in range(width):
        shifted = jax.lax.slice_in_dim(joined, width - 1 - back, width - 1 - back + tokens, axis=1)
        same_document = (since_start >= back)[:, :, None, None]
        total += (
            jnp.where(same_document, shifted, 0)
            * kernel[width - 1 - back].astype(x.dtype)[None, None]
        )
    kept = since_start[:, -1:] + 1 - jnp.arange(width - 1, 0, -1)[None] >= 0
    return total, jnp.where(kept[:, :, None, None], joined[:, 1 - width :], 0)


def convolution_step(
    x: Float[Array, "B 1 H R"], earlier: Float[Array, "B L H R"], kernel: Float[Array, "C H R"]
) -> tuple[Float[Array, "B 1 H R"], Float[Array, "B L H R"]]:
    """Returns the convolution for one token, and the last L inputs, including the token's.

    Args:
      x: the input of the token.
      earlier: the L inputs before the token.
      kernel: the factors of a channel; the last one belongs to the token itself.
    """
    joined = jnp.concatenate([earlier.astype(x.dtype), x], axis=1)
    total = jnp.sum(joined * kernel.astype(x.dtype)[None], axis=1, keepdims=True)
    return total, joined[:, 1:]
