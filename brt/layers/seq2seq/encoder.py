"""The encoder: source tokens to what the decoder reads."""

import flax.linen as nn
from jaxtyping import Array, Bool, Float

from brt.config import Kernels, Seq2Seq
from brt.layers.seq2seq.attention import EncoderAttention, SourceBias
from brt.layers.seq2seq.ends import Ends, after, before, check_length
from brt.layers.seq2seq.linear import Norm, RelativeBias
from brt.layers.seq2seq.mlp import Mlp
from brt.ops.encoder_attention import global_blocks, side_bias
from brt.ops.relative_bias import bias_tile


class EncoderLayer(nn.Module):
    """Self-attention and an MLP, each with its residual."""

    model: Seq2Seq
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.self_attn = EncoderAttention(self.model, self.training, self.kernels)
        self.self_attn_norm = Norm(self.model)
        self.mlp = Mlp(self.model, self.training)
        self.mlp_norm = Norm(self.model)

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"], shared: SourceBias
    ) -> Float[Array, "B T D"]:
        y = self.self_attn(before(self, self.self_attn_norm, x), mask, shared)
        x = after(self, self.self_attn_norm, x, y)
        return after(self, self.mlp_norm, x, self.mlp(before(self, self.mlp_norm, x)))


class Encoder(Ends):
    """Embedded source tokens through all layers."""

    def setup(self) -> None:
        super().setup()
        m = self.model
        if m.encoder_attention == "transient_global":
            self.global_rel_bias = RelativeBias(m)
        layer = nn.remat(EncoderLayer) if m.remat else EncoderLayer
        self.layers = [layer(m, self.training, self.kernels) for _ in range(m.encoder_layers)]

    def __call__(self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """Args: mask: False on padding, which is at the end of a row.

        Raises:
          ConfigError: a source longer than BART's positions.
        """
        check_length(self.model, x.shape[1], "source")
        x, shared = self.enter(x), self._shared(mask)
        for layer in self.layers:
            x = layer(x, mask, shared)
        return self.leave(x)

    def _shared(self, mask: Bool[Array, "B T"]) -> SourceBias:
        """Biases and blocks, the same in all layers."""
        m = self.model
        if m.family == "bart":
            return SourceBias(None)
        tokens, both = mask.shape[1], {"max_distance": m.relative_max_distance, "both_ways": True}
        if m.encoder_attention == "full":
            return SourceBias(bias_tile(self.rel_bias(), tokens, tokens, **both))
        block = m.encoder_radius + 1
        bias = bias_tile(self.rel_bias(), block, 3 * block, first=-block, **both)
        if m.encoder_attention != "transient_global":
            return SourceBias(bias)
        table, blocks = self.global_rel_bias(), global_blocks(mask, m.global_block)
        return SourceBias(
            bias, blocks, side_bias(table, blocks, max_distance=m.relative_max_distance)
        )
