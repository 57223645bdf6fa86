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
from brt.ops.encoder_attention import GlobalBlocks, SideKeys, block_sums, local_attention


class Projections(nn.Module):
    """Kernels `q`, `k`, `v` into heads and `o` out of them; there is no `k` if queries are also the
    keys.
    """

    block: Block
    training: bool = False
    shared_queries_keys: bool = False

    def setup(self) -> None:
        b = self.block
        width, heads, into = (b.model_dim,), (b.heads, b.head_dim), ("embed", "heads", "head_dim")
        # Queries that are not scaled where they are used start smaller.
        smaller = (b.model_dim * b.head_dim * b.scale**2) ** -0.5
        self.q = b.linear(width, heads, into, smaller)
        if not self.shared_queries_keys:
            self.k = b.linear(width, heads, into)
        self.v = b.linear(width, heads, into)
        self.o = b.linear(heads, width, ("heads", "head_dim", "embed"))

    def queries(self, x: Float[Array, "*B D"]) -> Float[Array, "*B H K"]:
        """Returns scaled queries."""
        return self.q(x) * self.block.scale

    def attend(self, *inputs: Array | Dropout | None) -> Float[Array, "*B H K"]:
        """Attends with a mask (`brt.ops.masked_attention`)."""
        name = self.block.kernels.masked_attention
        return masked_attention.attend(*inputs, implementation=name)

    def drop(self) -> Dropout | None:
        """Returns the dropout of attention weights, or None."""
        rate = self.block.attention_dropout
        return Dropout(self.make_rng("dropout"), rate) if self.training and rate else None


class Source(NamedTuple):
    """Inputs that all layers of an encoder share.

    Attributes:
      valid: False on padding.
      bias: float32 [H, T, T], or [H, W, 3 W] for a block of local attention; None for no bias.
      distance_bias: float32 bias by distance, for kinds of attention that take it in this form, or
        None.
      blocks: blocks of transient global tokens, or None.
      side: float32 bias of transient global tokens, or None.
    """

    valid: Bool[Array, "B T"]
    bias: Float[Array, "H Q S"] | None = None
    distance_bias: Float[Array, "H O"] | None = None
    blocks: GlobalBlocks | None = None
    side: Float[Array, "B H T G"] | None = None


class SelfAttention(Projections):
    """Self-attention: every valid token attends to all others, or to its neighbours and to sums of
    blocks.

    All kinds of attention have the same parameters, so that the same weights can be used with any
    kind.

    Attributes:
      attention: settings of the kind of attention.
      radius: number of positions on each side that a token attends to; 0 for all.
      has_globals: True if tokens attend to sums of blocks, which `global_norm` normalises.
    """

    attention: Attention = Attention()
    radius: int = 0
    has_globals: bool = False

    def setup(self) -> None:
        super().setup()
        if self.has_globals:
            self.global_norm = self.block.new_norm()

    def __call__(
        self, x: Float[Array, "B T D"], key: jax.Array, source: Source
    ) -> Float[Array, "B T D"]:
        """Returns the output of attention.

        Args:
          key: random key of kinds of attention that draw hash planes.
        """
        queries, scale, drop = self.q(x), self.block.scale, self.drop()
        kernels = self.block.kernels
        keys, values = queries if self.shared_queries_keys else self.k(x), self.v(x)
        if self.radius:
            side = self._side(x, source.blocks, source.side) if self.has_globals else None
            y = local_attention(
                queries * scale, keys, values, source.bias, source.valid, side, drop,
                radius=self.radius, implementation=kernels.encoder_attention,
            )  # fmt: skip
        elif source.bias is not None:
            seen = source.valid[:, None]
            y = self.attend(queries * scale, keys, values, source.bias, seen, drop)
        else:
            y = attention_kinds.attend(
                queries, keys, values, source.valid, self.attention, key, drop,
                scale=scale, bias=source.distance_bias, kernels=kernels,
            )  # fmt: skip
        return self.o(y)

    def _side(
        self, x: Float[Array, "B T D"], blocks: GlobalBlocks, bias: Float[Array, "B H T G"]
    ) -> SideKeys:
        sums = self.global_norm(block_sums(x, blocks))
        return SideKeys(self.k(sums), self.v(sums), bias, blocks.exist)
