"""The decoder: target tokens, and the source, to hidden vectors; whole targets or steps."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import CrossAttention, Kernels, Seq2Seq
from brt.layers.basic import compute_dtype
from brt.layers.seq2seq.attention import DecoderAttention, SelfCache
from brt.layers.seq2seq.cross_attention import SourceAttention
from brt.layers.seq2seq.ends import Ends, after, before, check_length
from brt.layers.seq2seq.linear import Norm
from brt.layers.seq2seq.mlp import Mlp
from brt.ops.cross_attention import CrossCache
from brt.ops.relative_bias import bias_row, bias_tile


class DecoderLayer(nn.Module):
    """Self-attention, attention to the source and an MLP, each with its residual."""

    model: Seq2Seq
    cross: CrossAttention
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.self_attn = DecoderAttention(self.model, self.training, self.kernels)
        self.self_attn_norm = Norm(self.model)
        self.cross_attn = SourceAttention(self.model, self.training, self.kernels, cross=self.cross)
        self.cross_attn_norm = Norm(self.model)
        self.mlp = Mlp(self.model, self.training)
        self.mlp_norm = Norm(self.model)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        bias: Float[Array, "H T T"] | None,
    ) -> Float[Array, "B T D"]:
        """Whole targets."""
        y = self.self_attn(before(self, self.self_attn_norm, x), bias)
        x = after(self, self.self_attn_norm, x, y)
        y = self.cross_attn(before(self, self.cross_attn_norm, x), encoded, mask)
        x = after(self, self.cross_attn_norm, x, y)
        return after(self, self.mlp_norm, x, self.mlp(before(self, self.mlp_norm, x)))

    def prefill(self, encoded: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> CrossCache:
        """What steps read of the source."""
        return self.cross_attn.prefill(encoded, mask)

    def step(
        self,
        x: Float[Array, "B N D"],
        caches: tuple[SelfCache, CrossCache],
        position: Int[Array, ""],
        bias: Float[Array, "H 1 T"] | None,
    ) -> tuple[Float[Array, "B N D"], SelfCache, CrossCache]:
        """One token of each of the N beams."""
        own, source = caches
        h = before(self, self.self_attn_norm, x)
        y, own = self.self_attn.step(h, own, position, bias)
        x = after(self, self.self_attn_norm, x, y)
        h = before(self, self.cross_attn_norm, x)
        y, source = self.cross_attn.step(h, source, position)
        x = after(self, self.cross_attn_norm, x, y)
        x = after(self, self.mlp_norm, x, self.mlp(before(self, self.mlp_norm, x)))
        return x, own, source


class Decoder(Ends):
    """Embedded target tokens through all layers."""

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
        super().setup()
        m = self.model
        layer = nn.remat(DecoderLayer, methods=["__call__"]) if m.remat else DecoderLayer
        self.layers = [
            layer(m, self.cross, self.training, self.kernels) for _ in range(m.decoder_layers)
        ]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
    ) -> Float[Array, "B T D"]:
        """Whole targets.

        Raises:
          ConfigError: targets longer than BART's positions.
        """
        m, tokens, bias = self.model, x.shape[1], None
        check_length(m, tokens, "target")
        if m.family == "t5":
            bias = bias_tile(
                self.rel_bias(), tokens, tokens,
                max_distance=m.relative_max_distance, both_ways=False,
            )  # fmt: skip
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, encoded, mask, bias)
        return self.leave(x)

    def prefill(
        self, encoded: Float[Array, "B S D"], mask: Bool[Array, "B S"]
    ) -> tuple[CrossCache, ...]:
        """What the steps of each layer read of the source."""
        return tuple(layer.prefill(encoded, mask) for layer in self.layers)

    def new_caches(self, batch: int, beams: int, length: int) -> tuple[SelfCache, ...]:
        """Empty caches of each layer, for targets of up to `length` tokens.

        Raises:
          ConfigError: longer than BART's positions.
        """
        m = self.model
        check_length(m, length, "target")
        zeros = jnp.zeros((batch, beams, length, m.heads, m.head_dim), compute_dtype(m))
        return tuple(SelfCache(zeros, zeros) for _ in range(m.decoder_layers))

    def step(
        self,
        x: Float[Array, "B N D"],
        own: tuple[SelfCache, ...],
        source: tuple[CrossCache, ...],
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B N D"], tuple[SelfCache, ...], tuple[CrossCache, ...]]:
        """One token of each of the N beams, at `position` of the targets."""
        bias = None
        if self.model.family == "t5":
            length, distance = own[0].keys.shape[2], self.model.relative_max_distance
            bias = bias_row(self.rel_bias(), position, length, max_distance=distance)
        batch, beams, size = x.shape
        x = self.enter(x.reshape(batch * beams, 1, size), position).reshape(x.shape)
        after = []
        for layer, *caches in zip(self.layers, own, source, strict=True):
            x, *caches = layer.step(x, tuple(caches), position, bias)
            after.append(caches)
        return self.leave(x), tuple(a for a, _ in after), tuple(b for _, b in after)
