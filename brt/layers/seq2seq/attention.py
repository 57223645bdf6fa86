"""Self-attention of the encoder and of the decoder."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Seq2Seq
from brt.layers.seq2seq.linear import Linear, Norm
from brt.layers.seq2seq.mlp import attention_dropout
from brt.ops.dropout import Dropout
from brt.ops.encoder_attention import GlobalBlocks, Side, block_sums, local_attention
from brt.ops.masked_attention import attend


class SourceBias(NamedTuple):
    """What all encoder layers share.

    Attributes:
      bias: float32 [H, T, T], or of a block [H, W, 3 W] where attention is local; BART: None.
      blocks: of transient global tokens, or None.
      side: float32, of transient global tokens, or None.
    """

    bias: Float[Array, "H Q S"] | None
    blocks: GlobalBlocks | None = None
    side: Float[Array, "B H T G"] | None = None


class SelfCache(NamedTuple):
    """Keys and values of the target tokens so far, of N beams that each have their own."""

    keys: Float[Array, "B N T H K"]
    values: Float[Array, "B N T H K"]


class Projections(nn.Module):
    """`q`, `k`, `v` into heads and `o` out of them."""

    model: Seq2Seq
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        heads, into = (m.heads, m.head_dim), ("embed", "heads", "head")
        # T5's queries are not scaled where they are used, so they start smaller.
        self.q = Linear(m, (m.model_dim,), heads, into, (m.model_dim * m.head_dim) ** -0.5)
        self.k = Linear(m, (m.model_dim,), heads, into, m.model_dim**-0.5)
        self.v = Linear(m, (m.model_dim,), heads, into, m.model_dim**-0.5)
        out = (m.heads * m.head_dim) ** -0.5
        self.o = Linear(m, heads, (m.model_dim,), ("heads", "head", "embed"), out)

    def queries(self, x: Float[Array, "*B D"]) -> Float[Array, "*B H K"]:
        """Queries; BART scales them, after their bias."""
        q = self.q(x)
        return q * self.model.head_dim**-0.5 if self.model.family == "bart" else q

    def attend(self, *inputs: Array | Dropout | None) -> Float[Array, "*B H K"]:
        """`masked_attention.attend`."""
        return attend(*inputs, implementation=self.kernels.masked_attention)

    def drop(self) -> Dropout | None:
        """Dropout of attention weights, where there is any."""
        rate = attention_dropout(self.model)
        if not self.training or rate == 0:
            return None
        return Dropout(self.make_rng("dropout"), rate)


class EncoderAttention(Projections):
    """Every source token sees all others, or its neighbours and sums of blocks."""

    def setup(self) -> None:
        super().setup()
        if self.model.encoder_attention == "transient_global":
            self.global_norm = Norm(self.model)

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"], shared: SourceBias
    ) -> Float[Array, "B T D"]:
        m = self.model
        q, k, v = self.queries(x), self.k(x), self.v(x)
        if m.encoder_attention == "full":
            y = self.attend(q, k, v, shared.bias, mask[:, None], self.drop())
            return self.o(y)
        side = None
        if m.encoder_attention == "transient_global":
            sums = self.global_norm(block_sums(x, shared.blocks))
            side = Side(self.k(sums), self.v(sums), shared.side, shared.blocks.exist)
        y = local_attention(
            q, k, v, shared.bias, mask, side, self.drop(),
            radius=m.encoder_radius, implementation=self.kernels.encoder_attention,
        )  # fmt: skip
        return self.o(y)


class DecoderAttention(Projections):
    """Every target token sees itself and those before it."""

    def __call__(
        self, x: Float[Array, "B T D"], bias: Float[Array, "H T T"] | None
    ) -> Float[Array, "B T D"]:
        """Whole targets."""
        seen = jnp.asarray(np.tri(x.shape[1], dtype=bool))[None]
        y = self.attend(self.queries(x), self.k(x), self.v(x), bias, seen, self.drop())
        return self.o(y)

    def step(
        self,
        x: Float[Array, "B N D"],
        cache: SelfCache,
        position: Int[Array, ""],
        bias: Float[Array, "H 1 T"] | None,
    ) -> tuple[Float[Array, "B N D"], SelfCache]:
        """One token of every beam, at `position`; writes it into the cache."""

        def written(past: Array, new: Float[Array, "B N H K"]) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(
                past, new[:, :, None].astype(past.dtype), position, axis=2
            )

        cache = SelfCache(written(cache.keys, self.k(x)), written(cache.values, self.v(x)))
        seen = (jnp.arange(cache.keys.shape[2]) <= position)[None, None, None]
        y = self.attend(self.queries(x)[:, :, None], cache.keys, cache.values, bias, seen)
        return self.o(y[:, :, 0]), cache
