"""The decoder of an encoder-decoder, over whole targets or token by token.

In shapes, B is the number of sources, S and T of source and target tokens, N of beams of a source,
L of layers. Masks are True for source tokens, False for padding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import CrossAttention
from brt.layers.seq2seq.attention import DecoderAttention, SelfCache
from brt.layers.seq2seq.cross_attention import SourceAttention
from brt.layers.seq2seq.ends import Ends, check_length
from brt.layers.transformer.block import Residual
from brt.layers.transformer.mlp import Mlp
from brt.layers.transformer.stacked import stacked
from brt.ops.cross_attention import CrossCache
from brt.ops.relative_bias import bias_row, bias_tile

Metrics = dict[str, Float[Array, "*L"]]


class TargetInputs(NamedTuple):
    """Inputs that all layers share when complete targets are read."""

    encoded: Float[Array, "B S D"]
    mask: Bool[Array, "B S"]
    bias: Float[Array, "H T T"] | None = None  # T5's relative position bias.


class StepInputs(NamedTuple):
    """Inputs that all layers share in a decoding step: the caches of the source have the layers on
    axis 1, and `bias` is T5's relative position bias between the token and all positions.
    """

    source: CrossCache
    position: Int[Array, ""]
    bias: Float[Array, "H 1 T"] | None


class DecoderLayer(Residual):
    """Self-attention, cross-attention and an MLP, each with a residual connection. Arguments and
    results have the form (x, each, shared) and (x, outputs) of `brt.layers.transformer.stacked`.
    """

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
        self.self_attn = DecoderAttention(self.block, self.training)
        self.self_attn_norm = self.block.new_norm()
        self.cross_attn = SourceAttention(self.block, self.training, cross=self.cross)
        self.cross_attn_norm = self.block.new_norm()
        self.mlp = Mlp(self.block, self.training)
        self.mlp_norm = self.block.new_norm()

    def __call__(
        self, x: Float[Array, "B T D"], _: None, inputs: TargetInputs
    ) -> tuple[Float[Array, "B T D"], Metrics]:
        y = self.self_attn(self.before(self.self_attn_norm, x), inputs.bias)
        x = self.after(self.self_attn_norm, x, y)
        h = self.before(self.cross_attn_norm, x)
        y, metrics = self.cross_attn(h, inputs.encoded, inputs.mask)
        return self._finish(self.after(self.cross_attn_norm, x, y)), metrics

    def _finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.after(self.mlp_norm, x, self.mlp(self.before(self.mlp_norm, x)))

    def prefill(self, x: None, _: None, inputs: TargetInputs) -> tuple[None, CrossCache]:
        return x, self.cross_attn.prefill(inputs.encoded, inputs.mask)

    def step(
        self,
        carried: tuple[Float[Array, "B N D"], SelfCache],
        layer: Int[Array, ""],
        inputs: StepInputs,
    ) -> tuple[tuple[Float[Array, "B N D"], SelfCache], PyTree[Array]]:
        """Reads one token of each beam. `carried` has the tokens' vectors and the self-attention
        caches of all layers, in which only the entries of this layer are written, so no other entry
        is copied.

        The further output is the field `carry` of this layer's cross-attention cache, the only
        field that a token changes.
        """
        x, own = carried
        cache = _of_layer(own, layer)
        h = self.before(self.self_attn_norm, x)
        y, cache = self.self_attn.step(h, cache, inputs.position, inputs.bias)
        x = self.after(self.self_attn_norm, x, y)
        h = self.before(self.cross_attn_norm, x)
        y, source = self.cross_attn.step(h, _of_layer(inputs.source, layer), inputs.position)
        own = jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, layer, 1), own, cache
        )
        return (self._finish(self.after(self.cross_attn_norm, x, y)), own), source.carry


class Decoder(Ends):
    """All layers of the decoder, from embedded target tokens to hidden vectors."""

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
        super().setup()
        m, methods = self.model, ("__call__", "prefill", "step")
        layers = stacked(DecoderLayer, m.decoder_layers, remat=m.remat, methods=methods)
        self.layers = layers(self.block, self.training, self.cross)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
    ) -> tuple[Float[Array, "B T D"], Metrics]:
        """Returns the hidden vectors of all target tokens, and metrics averaged over the layers."""
        m, tokens, bias = self.model, x.shape[1], None
        check_length(m, tokens, "target")
        if m.family == "t5":
            bias = bias_tile(
                self.rel_bias.embedding, tokens, tokens,
                max_distance=m.relative_max_distance, both_ways=False,
            )  # fmt: skip
        x, metrics = self.layers(self.enter(x), None, TargetInputs(encoded, mask, bias))
        return self.leave(x), jax.tree.map(jnp.mean, metrics)

    def prefill(self, encoded: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> CrossCache:
        return _second(self.layers.prefill(None, None, TargetInputs(encoded, mask))[1])

    def new_cache(self, batch: int, beams: int, length: int) -> SelfCache:
        """Returns empty self-attention caches for at most `length` tokens of each target."""
        m = self.model
        check_length(m, length, "target")
        shape = (batch, m.decoder_layers, beams, length, m.heads, m.head_dim)
        zeros = jnp.zeros(shape, self.block.dtype)
        return SelfCache(zeros, zeros)

    def step(
        self,
        x: Float[Array, "B N D"],
        own: SelfCache,
        source: CrossCache,
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B N D"], SelfCache, CrossCache]:
        """Reads one token of each beam, at `position`; `source` comes from `prefill`. Returns the
        hidden vectors and both caches for the next position.
        """
        bias = None
        if self.model.family == "t5":
            length, distance = own.keys.shape[3], self.model.relative_max_distance
            bias = bias_row(self.rel_bias.embedding, position, length, max_distance=distance)
        batch, beams, size = x.shape
        x = self.enter(x.reshape(batch * beams, 1, size), position).reshape(x.shape)
        layers, inputs = jnp.arange(self.model.decoder_layers), StepInputs(source, position, bias)
        (x, own), carry = self.layers.step((x, own), layers, inputs)
        return self.leave(x), own, source._replace(carry=_second(carry))


def _second(caches: PyTree[Array]) -> PyTree[Array]:
    # Moves the axis of layers from 0 to 1; scalars of a layer are left alone.
    return jax.tree.map(lambda x: x.swapaxes(0, 1) if x.ndim > 1 else x, caches)


def _of_layer(caches: PyTree[Array], layer: Int[Array, ""]) -> PyTree[Array]:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, layer, min(x.ndim - 1, 1), keepdims=False), caches
    )
