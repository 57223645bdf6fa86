"""The decoder of an encoder-decoder, over whole targets or token by token.

In shapes, B is the number of sources, S and T the numbers of source and target tokens, N the number
of beams of a source, D the width of the model, and H the number of heads.
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
    """Inputs that all layers share when complete targets are read.

    Attributes:
      encoded: the encoder's outputs for the S source tokens.
      mask: True for source tokens, False for padding.
      bias: T5's relative position bias between target tokens, by head; None if there is no bias, as
        in BART.
    """

    encoded: Float[Array, "B S D"]
    mask: Bool[Array, "B S"]
    bias: Float[Array, "H T T"] | None = None


class StepInputs(NamedTuple):
    """Inputs that all layers share in a decoding step.

    Attributes:
      source: the caches of cross-attention to the source for all layers, with layers on axis 1.
      position: the position of the token in the targets.
      bias: T5's relative position bias between the token and every target position, by head; None
        in BART.
    """

    source: CrossCache
    position: Int[Array, ""]
    bias: Float[Array, "H 1 T"] | None


class DecoderLayer(Residual):
    """Self-attention, cross-attention and an MLP, each with a residual connection.

    The arguments and results of the methods have the form that `brt.layers.transformer.stacked`
    requires: the arguments are arrays from the layer before, arrays of this layer alone and arrays
    that all layers read; the results are arrays for the next layer and further outputs.

    Attributes:
      cross: the kind of cross-attention and its settings.
    """

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
        """Creates self-attention, cross-attention, the MLP and their norms."""
        self.self_attn = DecoderAttention(self.block, self.training)
        self.self_attn_norm = self.block.new_norm()
        self.cross_attn = SourceAttention(self.block, self.training, cross=self.cross)
        self.cross_attn_norm = self.block.new_norm()
        self.mlp = Mlp(self.block, self.training)
        self.mlp_norm = self.block.new_norm()

    def __call__(
        self, x: Float[Array, "B T D"], _: None, inputs: TargetInputs
    ) -> tuple[Float[Array, "B T D"], Metrics]:
        """Returns the layer's output for all T target tokens, and metrics by name.

        Args:
          x: vectors of the target tokens.
          _: not used.
          inputs: the encoder's outputs, their mask and the bias, which all layers share.
        """
        y = self.self_attn(self.before(self.self_attn_norm, x), inputs.bias)
        x = self.after(self.self_attn_norm, x, y)
        h = self.before(self.cross_attn_norm, x)
        y, metrics = self.cross_attn(h, inputs.encoded, inputs.mask)
        return self._finish(self.after(self.cross_attn_norm, x, y)), metrics

    def _finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.after(self.mlp_norm, x, self.mlp(self.before(self.mlp_norm, x)))

    def prefill(self, x: None, _: None, inputs: TargetInputs) -> tuple[None, CrossCache]:
        """Returns None, and the layer's cache of cross-attention to the source, which `step` reads.

        Args:
          x: None, because no target tokens are read.
          _: not used.
          inputs: the encoder's outputs and their mask.
        """
        return x, self.cross_attn.prefill(inputs.encoded, inputs.mask)

    def step(
        self,
        carried: tuple[Float[Array, "B N D"], SelfCache],
        layer: Int[Array, ""],
        inputs: StepInputs,
    ) -> tuple[tuple[Float[Array, "B N D"], SelfCache], PyTree[Array]]:
        """Reads one token of each of the N beams in one layer.

        Only the entries of this layer are written in the caches, so no other entry is copied.

        Args:
          carried: the vectors of the tokens, and the self-attention caches of all layers.
          layer: the index of this layer.
          inputs: the inputs that all layers share.

        Returns:
          The tokens' vectors after this layer and the updated caches; and the field `carry` of this
          layer's cross-attention cache, the only field that a token changes.
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
    """All layers of the decoder, which map embedded target tokens to hidden vectors.

    Caches have the layers on axis 1.

    Attributes:
      cross: the kind of cross-attention and its settings.
    """

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
        """Creates the layers of the decoder, whose parameters are stacked."""
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
        """Returns the hidden vectors of all T target tokens, and metrics averaged over the layers.

        Args:
          x: the embedded target tokens.
          encoded: the encoder's outputs for the S source tokens.
          mask: True for source tokens, False for padding.

        Raises:
          ConfigError: the targets are longer than BART's positions.
        """
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
        """Returns the caches of the source for all layers, which `step` reads.

        Args:
          encoded: the encoder's outputs.
          mask: True for source tokens, False for padding.
        """
        return _second(self.layers.prefill(None, None, TargetInputs(encoded, mask))[1])

    def new_cache(self, batch: int, beams: int, length: int) -> SelfCache:
        """Returns the self-attention caches of all layers before the first token.

        Args:
          batch: the number of sources.
          beams: the number of targets that are decoded for each source.
          length: the largest number of tokens of a target.

        Raises:
          ConfigError: `length` exceeds BART's positions.
        """
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
        """Reads one token of each of the N beams, at `position` of the targets.

        Args:
          x: the embedded token of each beam.
          own: the self-attention caches of all layers.
          source: the caches of the source, from `prefill`.
          position: the position of the token in the targets.

        Returns:
          The hidden vector of the token, and both caches for the next position.
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
    """Moves the axis of layers from 0 to 1; scalars of a layer are left alone."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1) if x.ndim > 1 else x, caches)


def _of_layer(caches: PyTree[Array], layer: Int[Array, ""]) -> PyTree[Array]:
    """Returns the caches of one layer from the caches of all layers."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, layer, min(x.ndim - 1, 1), keepdims=False), caches
    )
