"""Layers of the encoder-decoders T5 and BART.

In shapes, B is the number of sources, S the number of tokens of a source and T that of a target
(both with padding), N the number of beams of a source, and L the number of layers. In the encoder,
T is the number of tokens of a source. Masks are True for source tokens, False for padding.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Attention, CrossAttention, Kernels, Seq2Seq
from brt.errors import ConfigError
from brt.layers.basic import dropout, parameter
from brt.layers.transformer import (
    DEVIATION,
    POSITION_OFFSET,
    Embedding,
    EncoderLayer,
    Mlp,
    Projections,
    Residual,
    SharedInputs,
    layer_keys,
    of_seq2seq,
    stacked,
)
from brt.ops import cross_attention
from brt.ops.cross_attention import CrossCache, CrossConfig
from brt.ops.encoder_attention import global_blocks, global_key_bias
from brt.ops.positions import bias_row, bias_tile, offset_bias


class SelfCache(NamedTuple):
    """Keys and values of the target tokens that were read so far, for each of N beams. The cache of
    a whole decoder has its L layers on axis 1.
    """

    keys: Float[Array, "B *L N T H K"]
    values: Float[Array, "B *L N T H K"]


class DecoderAttention(Projections):
    """Causal self-attention: every target token attends to itself and the tokens before it."""

    def __call__(
        self, x: Float[Array, "B T D"], bias: Float[Array, "H T T"] | None
    ) -> Float[Array, "B T D"]:
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
        """Returns the attention output of each beam's token at `position`, and the new cache."""

        def with_token(past: Array, new: Float[Array, "B N H K"]) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(
                past, new[:, :, None].astype(past.dtype), position, axis=2
            )

        cache = SelfCache(with_token(cache.keys, self.k(x)), with_token(cache.values, self.v(x)))
        seen = (jnp.arange(cache.keys.shape[2]) <= position)[None, None, None]
        y = self.attend(self.queries(x)[:, :, None], cache.keys, cache.values, bias, seen)
        return self.o(y[:, :, 0]), cache


def cross_config(config: CrossAttention, family: Literal["t5", "bart"] = "t5") -> CrossConfig:
    """Returns the configuration of `brt.ops.cross_attention` for the settings `CrossAttention`."""
    return CrossConfig(
        kind=config.kind,
        segment_size=config.segment_size,
        q_ref=config.q_ref,
        counts_padding=config.as_authors,
        use_segment="segment" not in config.without,
        use_raf="raf" not in config.without,
        kv_source="segment" if "remaining" in config.without else "remaining",
        norm="none" if "norm" in config.without else "feature",
        clamp=2.0 if config.as_authors and family == "bart" else 0.0,
        mix=config.mix,
        family=family,
    )


class ExtraParameters(nn.Module):
    """A group of parameters that only some kinds of cross-attention have, such as the group `raf`
    of accumulate-and-fire neurons (see `cross_attention.specifications`).
    """

    specifications: Mapping[str, Any]

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        return {
            name: parameter(self, name, spec.shape, spec.axes, spec.initializer)
            for name, spec in self.specifications.items()
        }


class SourceAttention(Projections):
    """Cross-attention with projections of queries, keys, values and outputs. Kinds with additional
    parameters have further submodules (`ExtraParameters`).
    """

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
        super().setup()
        heads, width = self.block.heads, self.block.head_dim
        groups = cross_attention.specifications(self._config(), heads, width)
        self.groups = tuple(groups)
        for name, specifications in groups.items():
            setattr(self, name, ExtraParameters(specifications))

    def _config(self) -> CrossConfig:
        return cross_config(self.cross, "t5" if self.block.norm == "rms" else "bart")

    def _extra_parameters(self) -> cross_attention.CrossParameters:
        return cross_attention.parameters_from(
            {name: getattr(self, name)() for name in self.groups}
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
        """Returns the attention output of all target tokens, and metrics by name, such as the
        firing rate of accumulate-and-fire neurons. `mask` is True for source tokens, False for
        padding.
        """
        y, aux = cross_attention.attend(
            self.queries(x), self.k(encoded), self.v(encoded), mask, self._extra_parameters(),
            self._config(),
            target_length=x.shape[1] if self.training else None, dropout=self.drop(),
            implementation=self.block.kernels.cross_attention,
        )  # fmt: skip
        metrics = {name: value for name, value in aux._asdict().items() if value is not None}
        return self.o(y), metrics

    def prefill(self, encoded: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> CrossCache:
        """Returns the cache of each source, which `step` reads for all beams of the source."""
        keys, values = self.k(encoded), self.v(encoded)
        return cross_attention.prefill(keys, values, mask, self._extra_parameters(), self._config())

    def step(
        self, x: Float[Array, "B N D"], cache: CrossCache, position: Int[Array, ""]
    ) -> tuple[Float[Array, "B N D"], CrossCache]:
        """Returns the attention output of each beam's token at `position`, and the next cache."""
        config = self._config()
        cache = cross_attention.advance(cache, position, config)
        y = cross_attention.step(self.queries(x)[:, :, None], cache, position, config)
        return self.o(y[:, :, 0]), cache


class Ends(nn.Module):
    """Base class of `Encoder` and `Decoder`: the computations before and after the layers.

    In BART, the position embeddings `pos_embed` and the norm `embed_norm` come before the first
    layer. In T5, the norm `final_norm` comes after the last layer, and all layers share the table
    `rel_bias` of relative position biases.
    """

    model: Seq2Seq
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        self.block = of_seq2seq(m, self.kernels)
        if m.family == "t5":
            self.rel_bias = relative_bias(m)
            self.final_norm = self.block.new_norm()
            return
        self.pos_embed = parameter(
            self, "pos_embed", (m.max_positions + POSITION_OFFSET, m.model_dim),
            ("positions", "embed"), nn.initializers.normal(DEVIATION),
        )  # fmt: skip
        self.embed_norm = self.block.new_norm()

    def enter(
        self, x: Float[Array, "B T D"], first: Int[Array, ""] | int = 0
    ) -> Float[Array, "B T D"]:
        """Returns the first layer's input for embedded tokens x with positions from `first` on."""
        if self.model.family == "bart":
            rows = jax.lax.dynamic_slice_in_dim(
                self.pos_embed, first + POSITION_OFFSET, x.shape[1], axis=0
            )
            x = self.embed_norm(x + rows[None].astype(x.dtype))
        return dropout(self, x, self.model.dropout)

    def leave(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Returns x after a norm and dropout in a T5 model, and x itself in a BART model."""
        if self.model.family == "bart":
            return x
        return dropout(self, self.final_norm(x), self.model.dropout)


def relative_bias(model: Seq2Seq) -> Embedding:
    """Returns a module with T5's table [R, H] of biases, for R buckets of distances and H heads."""
    shape = (model.relative_buckets, model.heads)
    return Embedding(shape, ("buckets", "heads"), model.model_dim**-0.5)


def check_length(model: Seq2Seq, length: int, what: str) -> None:
    """Raises ConfigError if a sequence, named `what`, has more tokens than BART has positions."""
    if model.family == "bart" and length > model.max_positions:
        raise ConfigError(
            f"a {what} of {length} tokens is longer than Model.max_positions = "
            f"{model.max_positions}; lower Pairs.max_{what}_length or Decoding.max_length, or "
            "extend the positions (brt.models.seq2seq.extend_positions)"
        )


class Encoder(Ends):
    """All layers of the encoder, which map embedded source tokens to hidden vectors."""

    attention: Attention = Attention()

    def setup(self) -> None:
        super().setup()
        m, has_globals = self.model, self.model.encoder_attention == "transient_global"
        if has_globals:
            self.global_rel_bias = relative_bias(m)
        self.layers = stacked(EncoderLayer, m.encoder_layers, remat=m.remat)(
            self.block, self.training, self.attention,
            radius=0 if m.encoder_attention == "full" else m.encoder_radius,
            has_globals=has_globals,
        )  # fmt: skip

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"], key: jax.Array
    ) -> Float[Array, "B T D"]:
        """Returns the hidden vectors of the source tokens. `mask` is False for padding, which is at
        the end of a row. `key` is the random key of kinds of attention that draw random numbers.
        """
        check_length(self.model, x.shape[1], "source")
        keys = layer_keys(key, self.model.encoder_layers)
        x, _ = self.layers(self.enter(x), keys, self._shared_inputs(mask))
        return self.leave(x)

    def _shared_inputs(self, mask: Bool[Array, "B T"]) -> SharedInputs:
        m = self.model
        if m.family == "bart":
            return SharedInputs(mask)
        table, tokens = self.rel_bias.embedding, mask.shape[1]
        options = {"max_distance": m.relative_max_distance, "both_ways": True}
        if m.encoder_attention == "full" and self.attention.kind != "full":
            distances = np.arange(1 - tokens, tokens)
            return SharedInputs(mask, distance_bias=offset_bias(table, distances, **options))
        if m.encoder_attention == "full":
            return SharedInputs(mask, bias_tile(table, tokens, tokens, **options))
        block = m.encoder_radius + 1
        bias = bias_tile(table, block, 3 * block, first=-block, **options)
        if m.encoder_attention != "transient_global":
            return SharedInputs(mask, bias)
        blocks = global_blocks(mask, m.global_block)
        global_bias = global_key_bias(
            self.global_rel_bias.embedding, blocks, max_distance=m.relative_max_distance
        )
        return SharedInputs(mask, bias, blocks=blocks, global_bias=global_bias)


Metrics = dict[str, Float[Array, "*L"]]


class TargetInputs(NamedTuple):
    """Inputs that all layers share when complete targets are read."""

    encoded: Float[Array, "B S D"]
    mask: Bool[Array, "B S"]
    bias: Float[Array, "H T T"] | None = None  # T5's relative position bias.


class StepInputs(NamedTuple):
    """Inputs that all layers share in a decoding step.

    The caches of the source have the layers on axis 1. `bias` is T5's relative position bias
    between the token at `position` and all positions.
    """

    source: CrossCache
    position: Int[Array, ""]
    bias: Float[Array, "H 1 T"] | None


class DecoderLayer(Residual):
    """Self-attention, cross-attention and an MLP, each with a residual connection.

    The methods have the arguments (x, each, shared) and return (x, outputs), as the docstring of
    `brt.layers.transformer.stacked` describes.
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
        x = self.around(self.self_attn_norm, x, lambda h: self.self_attn(h, inputs.bias))
        h = self.before(self.cross_attn_norm, x)
        y, metrics = self.cross_attn(h, inputs.encoded, inputs.mask)
        x = self.after(self.cross_attn_norm, x, y)
        return self.around(self.mlp_norm, x, self.mlp), metrics

    def prefill(self, x: None, _: None, inputs: TargetInputs) -> tuple[None, CrossCache]:
        return x, self.cross_attn.prefill(inputs.encoded, inputs.mask)

    def step(
        self,
        carried: tuple[Float[Array, "B N D"], SelfCache],
        layer: Int[Array, ""],
        inputs: StepInputs,
    ) -> tuple[tuple[Float[Array, "B N D"], SelfCache], PyTree[Array]]:
        """Reads one token of each beam. `carried` has the tokens' vectors and the self-attention
        caches of all layers. The method writes only the entries of this layer into these caches, so
        that the entries of other layers are not copied.

        The second result is the field `carry` of this layer's cross-attention cache, the only field
        that a token changes.
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
        x = self.after(self.cross_attn_norm, x, y)
        return (self.around(self.mlp_norm, x, self.mlp), own), source.carry


class Decoder(Ends):
    """All layers of the decoder, which map embedded target tokens to hidden vectors."""

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
        """Reads one token of each beam, at `position`. `source` comes from `prefill` or from the
        step before. Returns the hidden vectors and both caches for the next position.
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
    # Moves the axis of layers from 0 to 1, except in arrays that have only this axis.
    return jax.tree.map(lambda x: x.swapaxes(0, 1) if x.ndim > 1 else x, caches)


def _of_layer(caches: PyTree[Array], layer: Int[Array, ""]) -> PyTree[Array]:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, layer, min(x.ndim - 1, 1), keepdims=False), caches
    )
