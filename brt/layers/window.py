"""The sliding-window layer of Transformer-XL: each block attends to itself and to a cache of the
previous block. The letters of shapes are those of `brt.layers.state`.
"""

import flax.linen as nn
from jaxtyping import Array, Float

from brt.config import Kernels, Model
from brt.layers.attention import Mix, TransformerBlock
from brt.layers.basic import mlp_flops
from brt.layers.cache import closed_window, with_cache
from brt.layers.sections import Recurrence
from brt.layers.state import Given, LayerOutput, open_block


class WindowLayer(nn.Module):
    """A sliding-window layer: causal attention of each token to its window, followed by an MLP.

    Layers with a memory in addition to the window are subclasses. They have the cache in the field
    `window` of their state, and keep further data of an open block in `OpenBlock.memory`. A
    subclass whose tokens attend to keys beyond the window defines `mix_step`, `__call__` and
    `end_block`.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        self.tokens = TransformerBlock(m, m.feedback, self.training, self.kernels)

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        projections = self.tokens.project(x)
        past, after = with_cache(self.model, given, projections)
        return LayerOutput(self.tokens.attend(projections, past, given.feedback), after)

    def mix_step(self, given: Given) -> Mix | None:
        """Returns the function that adds attention to keys beyond the window while tokens are read
        one by one; None if the layer has no such keys.
        """
        return None

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(x, open_block(given))

    def prepare_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(x, self.tokens.prepared(given.block, given.position))

    def decode_step(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        return LayerOutput(*self.tokens.attend_step(x, given, self.mix_step(given)))

    def end_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(x, closed_window(self.model, given))


def window_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer with its MLP.

    Only matrix products are counted, 2 m n k for the product of an m x k and a k x n matrix. A
    token counts as attending to exactly `Model.window` keys and to all sinks, even if an
    implementation computes the logits of more keys.
    """
    m, width = model, model.heads * model.head_dim
    projections = 4 * m.model_dim * (width + m.key_heads * m.head_dim)
    # The factor is 4, because there are two products, one with keys and one with values, and each
    # takes 2 FLOPs per multiplication.
    attention = 4 * width * (m.window + m.sliding.sinks)
    state_attention = state_attention_flops(model) if m.feedback else 0
    return projections + attention + mlp_flops(model) + state_attention


def state_attention_flops(model: Model) -> int:
    """Returns the FLOPs per token of the attention of tokens to recurrent states: two projections,
    of queries and of the result, and the products with the states' keys and values.
    """
    width = model.heads * model.head_dim
    return 4 * model.model_dim * width + 4 * width * model.of(Recurrence).states


def keys_before(model: Model, block: int) -> int:
    """Returns how many keys of its own block a token sees. The number is the mean over the `block`
    tokens of the block.
    """
    return (block + 1) // 2 if model.sliding.attend_to_self else (block - 1) // 2
