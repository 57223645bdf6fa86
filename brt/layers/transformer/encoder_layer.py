"""A layer of an encoder: of RoBERTa, or of the encoder of T5 or BART."""

import jax
from jaxtyping import Array, Float

from brt.config import Attention
from brt.layers.transformer.attention import SelfAttention, SharedInputs
from brt.layers.transformer.block import Residual
from brt.layers.transformer.mlp import Mlp


class EncoderLayer(Residual):
    """Self-attention and an MLP, each with a residual connection and a norm before or after it.

    Attributes:
      attention: the kind of self-attention and its settings.
      radius: the number of positions on each side that a token attends to; 0 for all positions.
      has_globals: True if tokens also attend to transient global tokens, which are sums of blocks
        (LongT5).
      shared_queries_keys: True if the queries of self-attention are also its keys.
    """

    attention: Attention = Attention()
    radius: int = 0
    has_globals: bool = False
    shared_queries_keys: bool = False

    def setup(self) -> None:
        """Creates self-attention, the MLP and their norms."""
        self.self_attn = SelfAttention(
            self.block, self.training, self.shared_queries_keys, self.attention, self.radius,
            self.has_globals,
        )  # fmt: skip
        self.self_attn_norm = self.block.new_norm()
        self.mlp = Mlp(self.block, self.training)
        self.mlp_norm = self.block.new_norm()

    def __call__(
        self, x: Float[Array, "B T D"], key: jax.Array, inputs: SharedInputs
    ) -> tuple[Float[Array, "B T D"], None]:
        """Returns the layer's output for all T tokens, and None for further outputs, because
        `brt.layers.transformer.stacked` expects a pair.

        Args:
          x: vectors of width D for the T tokens of B rows of the batch.
          key: the random key of this layer, for kinds of attention that draw random numbers.
          inputs: the mask of the tokens and the biases, which all layers share.
        """
        y = self.self_attn(self.before(self.self_attn_norm, x), key, inputs)
        x = self.after(self.self_attn_norm, x, y)
        return self.after(self.mlp_norm, x, self.mlp(self.before(self.mlp_norm, x))), None
