"""The base class of layers whose state changes with every token, such as linear recurrences, and
the short causal convolution that these layers apply to the tokens of a document.

In shapes, R is the number of channels of a head, C of tokens that the convolution reads, and L =
C - 1. The other letters of shapes are those of `brt.layers.state`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.basic import dropout, normed
from brt.layers.state import Given, LayerOutput

CONVOLVED = 4  # The convolution reads this many tokens, including the token itself.


def tokens_since_start(document_start: Bool[Array, "B N"], tokens: int) -> Int[Array, "B T"]:
    """Returns, for each token of a segment, the number of earlier tokens of the token's document.

    If the document started before the segment, the true number is unknown. The result is then a
    number that is larger than T and `CONVOLVED`, and so larger than every distance between tokens
    that a caller compares with the result.
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
    """Returns the causal convolution of a segment, in which no token reads another document, and
    the inputs of the last L tokens, which are `earlier` for the next segment.

    The output of a token is a weighted sum of the inputs of the token and of the L tokens before
    it, with separate weights for each channel. The last of the C weights of a channel in `kernel`
    belongs to the token itself.

    The next segment continues the last document of this segment, so inputs of earlier documents are
    replaced by zeros. `since_start` is the result of `tokens_since_start`.
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
    """Returns the convolution's output for one token, and `earlier` for the next token."""
    joined = jnp.concatenate([earlier.astype(x.dtype), x], axis=1)
    total = jnp.sum(joined * kernel.astype(x.dtype)[None], axis=1, keepdims=True)
    return total, joined[:, 1:]


class TokenStateLayer(nn.Module):
    """Base class of layers whose state changes with every token, and not with every block.

    When such a layer reads token by token, its open block is the state after the tokens that have
    been read so far. A subclass defines `__call__`, `decode_step`, and a `setup` that creates
    `norm` and `mlp`. `kernels` is unused, because each operation of the subclasses has a single
    implementation.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def _normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.model.norm.before:
            x = normed(self.model, x, self.norm)
        return dropout(self, x, self.model.dropout)

    def _finish(
        self, x: Float[Array, "B T D"], read: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        x = x + dropout(self, read, self.model.dropout)
        return x + self.mlp(x, None)

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(x, given.state)

    def end_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(x, given.block)
