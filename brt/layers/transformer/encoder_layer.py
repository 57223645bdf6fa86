"""A layer of an encoder: of RoBERTa, or of the encoder of T5 or BART."""

import jax
from jaxtyping import Array, Float

from brt.config import Attention
from brt.layers.transformer.attention import SelfAttention, SharedInputs
from brt.layers.transformer.block import Residual
from brt.layers.transformer.mlp import Mlp


class EncoderLayer(Residual):
    """`SelfAttention` and an MLP, each with a residual connection and a norm before or after it."""

    attention: Attention = Attention()
    radius: int = 0
    has_globals: bool = False
    shared_queries_keys: bool = False

    def setup(self) -> None:
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
        """Returns the output and None, because `brt.layers.transformer.stacked` expects a pair."""
        y = self.self_attn(self.before(self.self_attn_norm, x), key, inputs)
        x = self.after(self.self_attn_norm, x, y)
        return self.after(self.mlp_norm, x, self.mlp(self.before(self.mlp_norm, x))), None
