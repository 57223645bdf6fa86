"""Self-attention of encoders, and the projections of attention.

In shapes, B is the number of rows of the batch, T the padded number of tokens, D the width of the
model, H the number of heads, and K the size of a head.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
from jaxtyping import Array, Bool, Float

from brt.config import Attention
from brt.layers import attention_kinds
from brt.layers.transformer.block import Block
from brt.ops import masked_attention
from brt.ops.dropout import Dropout
from brt.ops.encoder_attention import GlobalBlocks, GlobalKeys, block_sums, local_attention


class Projections(nn.Module):
    """Base class of attention modules: the projections to queries, keys and values of H heads, and
    from the heads to the output.

    Attributes:
      block: sizes and settings of the layer.
      training: True applies dropout.
      shared_queries_keys: True if the queries are also the keys, so that there is no projection of
        keys (`k`).
    """

    block: Block
    training: bool = False
    shared_queries_keys: bool = False

    def setup(self) -> None:
        """Creates the projections of queries, keys, values and outputs."""
        b = self.block
        width, heads, into = (b.model_dim,), (b.heads, b.head_dim), ("embed", "heads", "head_dim")
        # If the logits are not divided by the square root of the head size, as in T5, the initial
        # kernel of the queries is divided by this root instead.
        smaller = (b.model_dim * b.head_dim * b.scale**2) ** -0.5
        self.q = b.linear(width, heads, into, smaller)
        if not self.shared_queries_keys:
            self.k = b.linear(width, heads, into)
        self.v = b.linear(width, heads, into)
        self.o = b.linear(heads, width, ("heads", "head_dim", "embed"))

    def queries(self, x: Float[Array, "*B D"]) -> Float[Array, "*B H K"]:
        """Returns the queries of the vectors x [..., D] by head [..., H, K], multiplied by
        `block.scale`.
        """
        return self.q(x) * self.block.scale

    def attend(self, *inputs: Array | Dropout | None) -> Float[Array, "*B H K"]:
        """Returns the output [B, T, H, K] of attention of T queries to X keys.

        Args:
          inputs: the arguments of `brt.ops.masked_attention.attend`: queries [B, T, H, K], keys and
            values [B, X, H, K], a bias of the logits or None, a mask that is True where a query may
            see a key, and the dropout of attention weights or None.
        """
        name = self.block.kernels.masked_attention
        return masked_attention.attend(*inputs, implementation=name)

    def drop(self) -> Dropout | None:
        """Returns the dropout of attention weights; None outside of training or at rate 0."""
        rate = self.block.attention_dropout
        return Dropout(self.make_rng("dropout"), rate) if self.training and rate else None


class SharedInputs(NamedTuple):
    """Inputs that all layers of an encoder share.

    Attributes:
      valid: True for tokens, False for padding.
      bias: the float32 bias of the logits of Q queries and S keys. For full attention, Q = S = T.
        For local attention, the Q = W tokens of a block attend to the S = 3 W tokens of the block
        and its two neighbours. None for no bias.
      distance_bias: the float32 bias of each of O = 2 T - 1 distances (position of the key minus
        position of the query) from 1 - T to T - 1, for kinds of attention that need the bias in
        this form; None for others.
      blocks: the division of the tokens into G blocks, each of which has a transient global token,
        the sum of its tokens (LongT5); None if there are no global tokens.
      global_bias: the float32 bias between tokens and the G global tokens; None if there are none.
    """

    valid: Bool[Array, "B T"]
    bias: Float[Array, "H Q S"] | None = None
    distance_bias: Float[Array, "H O"] | None = None
    blocks: GlobalBlocks | None = None
    global_bias: Float[Array, "B H T G"] | None = None


class SelfAttention(Projections):
    """Self-attention of an encoder: a token attends to all valid tokens, or to its neighbours and
    to transient global tokens, which are sums of blocks (LongT5).

    All kinds of attention have the same parameters, so that the same weights can be used with any
    kind.

    Attributes:
      attention: the kind of attention and its settings.
      radius: the number of positions on each side that a token attends to; 0 for all positions.
      has_globals: True if tokens also attend to sums of blocks, which the norm `global_norm`
        normalises.
    """

    attention: Attention = Attention()
    radius: int = 0
    has_globals: bool = False

    def setup(self) -> None:
        """Creates the projections, and the norm of global tokens if there are any."""
        super().setup()
        if self.has_globals:
            self.global_norm = self.block.new_norm()

    def __call__(
        self, x: Float[Array, "B T D"], key: jax.Array, inputs: SharedInputs
    ) -> Float[Array, "B T D"]:
        """Returns the attention output of every token.

        Args:
          x: the vectors of the tokens.
          key: the random key for kinds of attention that draw random numbers.
          inputs: the mask and the biases, which all layers share.
        """
        queries, scale, drop = self.q(x), self.block.scale, self.drop()
        kernels = self.block.kernels
        keys, values = queries if self.shared_queries_keys else self.k(x), self.v(x)
        if self.radius:
            global_keys = None
            if self.has_globals:
                global_keys = self._global_keys(x, inputs.blocks, inputs.global_bias)
            y = local_attention(
                queries * scale, keys, values, inputs.bias, inputs.valid, global_keys, drop,
                radius=self.radius, implementation=kernels.encoder_attention,
            )  # fmt: skip
        elif inputs.bias is not None:
            seen = inputs.valid[:, None]
            y = self.attend(queries * scale, keys, values, inputs.bias, seen, drop)
        else:
            y = attention_kinds.attend(
                queries, keys, values, inputs.valid, self.attention, key, drop,
                scale=scale, bias=inputs.distance_bias, kernels=kernels,
            )  # fmt: skip
        return self.o(y)

    def _global_keys(
        self, x: Float[Array, "B T D"], blocks: GlobalBlocks, bias: Float[Array, "B H T G"]
    ) -> GlobalKeys:
        sums = self.global_norm(block_sums(x, blocks))
        return GlobalKeys(self.k(sums), self.v(sums), bias, blocks.exist)
