"""Self-attention of encoders, and the projections of attention."""

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
    """Base class of attention modules: the projections to queries, keys (unless the queries are
    also the keys) and values, and from the heads to the output.
    """

    block: Block
    training: bool = False
    shared_queries_keys: bool = False

    def setup(self) -> None:
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
        return self.q(x) * self.block.scale

    def attend(self, *inputs: Array | Dropout | None) -> Float[Array, "*B H K"]:
        """Attends with the arguments of `brt.ops.masked_attention.attend`."""
        name = self.block.kernels.masked_attention
        return masked_attention.attend(*inputs, implementation=name)

    def drop(self) -> Dropout | None:
        rate = self.block.attention_dropout
        return Dropout(self.make_rng("dropout"), rate) if self.training and rate else None


class SharedInputs(NamedTuple):
    """Inputs that all layers of an encoder share. Biases are float32 and are added to the logits.

    Attributes:
      bias: the bias of Q queries and S keys. For full attention, Q = S = T. For local attention,
        the Q = W tokens of a block attend to the S = 3 W tokens of the block and its two
        neighbours.
      distance_bias: the bias of each of O = 2 T - 1 distances (position of the key minus position
        of the query) from 1 - T to T - 1, for kinds of attention that need the bias in this form.
      blocks: the division of the tokens into G blocks, each of which has a transient global token,
        the sum of its tokens (LongT5).
      global_bias: the bias between tokens and the G global tokens.
    """

    valid: Bool[Array, "B T"]
    bias: Float[Array, "H Q S"] | None = None
    distance_bias: Float[Array, "H O"] | None = None
    blocks: GlobalBlocks | None = None
    global_bias: Float[Array, "B H T G"] | None = None


class SelfAttention(Projections):
    """Self-attention of an encoder: a token attends to all valid tokens (`radius` = 0), or to
    `radius` neighbours on each side and, with `has_globals`, to sums of blocks (LongT5).

    All kinds of attention have the same parameters, so weights can be used with any kind.
    """

    attention: Attention = Attention()
    radius: int = 0
    has_globals: bool = False

    def setup(self) -> None:
        super().setup()
        if self.has_globals:
            self.global_norm = self.block.new_norm()

    def __call__(
        self, x: Float[Array, "B T D"], key: jax.Array, inputs: SharedInputs
    ) -> Float[Array, "B T D"]:
        """Returns the attention output; `key` is for kinds that draw random numbers."""
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
