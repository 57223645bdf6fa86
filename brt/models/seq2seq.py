"""Encoder-decoders: T5 (1.0, 1.1), LongT5's encoders and BART as settings of one model.

Training calls `encode`, then `decode` over whole targets. Generation calls `encode` and `prefill`
once, and then `step` for each token of all beams. The encoded source and everything computed from
it exist once for each source, not once for each beam.

In shapes, B is the number of sources, S and T the padded numbers of tokens of a source and of a
target, N the number of beams of a source, D the width of the model, and V the number of tokens in
the vocabulary. Caches also have L layers, and H heads of size K.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt import config
from brt.errors import ConfigError
from brt.layers.basic import ZEROS, compute_dtype, parameter
from brt.layers.seq2seq.attention import SelfCache
from brt.layers.seq2seq.decoder import Decoder, Metrics
from brt.layers.seq2seq.encoder import Encoder
from brt.layers.transformer.linear import DEVIATION, POSITION_OFFSET, Embedding
from brt.ops.cross_attention import CrossCache
from brt.ops.few_rows import transposed_product

Params = dict[str, Any]


class DecodeState(NamedTuple):
    """The state that generation carries from token to token. Axis 1 of the caches is the layer.

    Attributes:
      position: int32, number of target tokens read so far, the same for all beams.
      own: self-attention caches [B, L, N, T, H, K]: the keys and values of the target tokens of
        each beam.
      source: the caches of cross-attention to the source, which all beams of a source share.
    """

    position: Int[Array, ""]
    own: SelfCache
    source: CrossCache


class Decoded(NamedTuple):
    """The result of reading whole targets.

    Attributes:
      hidden: the vector of each token, from which `logits` computes the logits of the next token.
      metrics: scalars to log, means over the layers: `firing_rate`, `leak` and `threshold` if the
        cross-attention has accumulate-and-fire neurons; otherwise empty.
    """

    hidden: Float[Array, "B T D"]
    metrics: Metrics


class Readout(NamedTuple):
    """The map from hidden vectors to logits: scale * hidden @ embedding.T + bias.

    Attributes:
      embedding: the vector of each token in the vocabulary.
      bias: the bias of each token in the vocabulary, a constant (BART does not train this bias);
        None for no bias.
      scale: the factor of the products.
    """

    embedding: Float[Array, "V D"]
    bias: Float[Array, " V"] | None
    scale: float


class Seq2Seq(nn.Module):
    """An encoder-decoder.

    Attributes:
      model: the settings, with the size of the vocabulary set.
      cross: settings of the cross-attention.
      training: True enables dropout (needs the rng 'dropout').
      attention: settings of the encoder's self-attention. No parameter depends on these settings.
      kernels: the settings that select the implementations of operations.
    """

    model: config.Seq2Seq
    cross: config.CrossAttention = config.CrossAttention()
    training: bool = False
    attention: config.Attention = config.Attention()
    kernels: config.Kernels = config.Kernels()

    def setup(self) -> None:
        """Creates the embeddings, the encoder, the decoder and the bias of the logits."""
        m = self.model
        self.token_embed = self._embedding()
        self.encoder = Encoder(m, self.training, self.kernels, self.attention)
        self.decoder = Decoder(m, self.training, self.kernels, self.cross)
        if not m.tied_logits:
            self.lm_head = self._embedding()
        if m.family == "bart":
            self.logits_bias = parameter(self, "logits_bias", (m.vocab_size,), ("vocab",), ZEROS)

    def _embedding(self) -> Embedding:
        m = self.model
        deviation = DEVIATION if m.family == "bart" else 1.0
        return Embedding(
            (m.vocab_size, m.model_dim), ("vocab", "embed"), deviation, compute_dtype(m)
        )

    def __call__(
        self,
        source: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        targets_in: Int[Array, "B T"],
        key: jax.Array | None = None,
    ) -> Decoded:
        """Encodes sources, and decodes the whole targets `targets_in`. The arguments are explained
        in `encode` and `decode`.
        """
        if self.is_initializing() and not self.model.tied_logits:
            # Initialization has to call all modules. No other method calls `lm_head`, because the
            # function `readout` reads the parameters of `lm_head` directly.
            self.lm_head(targets_in)
        return self.decode(self.encode(source, mask, key), mask, targets_in)

    def encode(
        self, source: Int[Array, "B S"], mask: Bool[Array, "B S"], key: jax.Array | None = None
    ) -> Float[Array, "B S D"]:
        """Returns the encoder's outputs for sources.

        Args:
          source: the token ids.
          mask: True for tokens, False for padding, which is at the end of a row.
          key: a random key for kinds of attention that draw random numbers; None for a fixed key.
        """
        key = jax.random.key(0) if key is None else key
        return self.encoder(self.token_embed(source), mask, key)

    def decode(
        self,
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        targets_in: Int[Array, "B T"],
    ) -> Decoded:
        """Reads whole targets. Every token attends to the source, to itself and to earlier tokens.

        Args:
          encoded: the encoder's outputs.
          mask: True for source tokens, False for padding.
          targets_in: the inputs of the decoder: the start token, then the target without its last
            token.
        """
        return Decoded(*self.decoder(self.token_embed(targets_in), encoded, mask))

    def prefill(
        self,
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        beams: int,
        max_length: int,
    ) -> DecodeState:
        """Returns the decoding state before the first target token.

        Args:
          encoded: the encoder's outputs.
          mask: True for source tokens, False for padding.
          beams: the number of beams of each source.
          max_length: the largest number of target tokens, including the start token.
        """
        own = self.decoder.new_cache(encoded.shape[0], beams, max_length)
        return DecodeState(jnp.zeros((), jnp.int32), own, self.decoder.prefill(encoded, mask))

    def step(
        self, tokens: Int[Array, "B N"], state: DecodeState
    ) -> tuple[Float[Array, "B N D"], DecodeState]:
        """Reads the next token of every beam; returns the hidden vectors of these tokens and the
        state after them.

        Args:
          tokens: the id of the next token of each beam.
          state: the state after the earlier tokens.
        """
        x = self.token_embed(tokens)
        x, own, source = self.decoder.step(x, state.own, state.source, state.position)
        return x, DecodeState(state.position + 1, own, source)


def init(network: Seq2Seq, key: Array) -> Params:
    """Returns initial parameters of the network, drawn with the random key `key`. Each array is in
    a Flax box together with the names of its axes, by which the array is sharded.
    """
    tokens, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return network.init(key, tokens, mask, tokens)["params"]


def encode(
    network: Seq2Seq, params: Params, source: Int[Array, "B S"], mask: Bool[Array, "B S"]
) -> Float[Array, "B S D"]:
    """Returns the encoder's outputs for sources, computed by the method `Seq2Seq.encode` without
    dropout.

    Args:
      network: the model.
      params: the parameters of the model.
      source: the token ids of the sources.
      mask: True for tokens, False for padding, which is at the end of a row.
    """
    found: Any = network.apply({"params": params}, source, mask, method="encode")
    return found


def decode(
    network: Seq2Seq,
    params: Params,
    encoded: Float[Array, "B S D"],
    mask: Bool[Array, "B S"],
    targets_in: Int[Array, "B T"],
) -> Decoded:
    """Returns the hidden vectors of whole targets, computed by the method `Seq2Seq.decode` without
    dropout. The function `logits` computes the logits of the next tokens from these vectors.

    Args:
      network: the model.
      params: the parameters of the model.
      encoded: the encoder's outputs.
      mask: True for source tokens, False for padding.
      targets_in: the inputs of the decoder: the start token, then the target without its last
        token.
    """
    found: Any = network.apply({"params": params}, encoded, mask, targets_in, method="decode")
    return found


def prefill(
    network: Seq2Seq,
    params: Params,
    encoded: Float[Array, "B S D"],
    mask: Bool[Array, "B S"],
    beams: int,
    max_length: int,
) -> DecodeState:
    """Returns the decoding state before the first target token, computed by the method
    `Seq2Seq.prefill`.

    Args:
      network: the model.
      params: the parameters of the model.
      encoded: the encoder's outputs.
      mask: True for source tokens, False for padding.
      beams: the number of beams of each source.
      max_length: the largest number of target tokens, including the start token.
    """
    variables, given = {"params": params}, (encoded, mask, beams, max_length)
    found: Any = network.apply(variables, *given, method="prefill")
    return found


def step(
    network: Seq2Seq, params: Params, tokens: Int[Array, "B N"], state: DecodeState
) -> tuple[Float[Array, "B N V"], DecodeState]:
    """Reads the next token of every beam.

    Args:
      network: the model.
      params: the parameters of the model.
      tokens: the id of the next token of each beam.
      state: the state after the earlier tokens.

    Returns:
      The float32 logits of the token that follows, and the state after the token that was read.
    """
    found: Any = network.apply({"params": params}, tokens, state, method="step")
    hidden, state = found
    return logits(readout(network.model, params), hidden), state


def reorder(state: DecodeState, beams: Int[Array, "B N"]) -> DecodeState:
    """Returns the decoding state in which beam n of source b is the earlier beam `beams[b, n]` of
    the source.

    A beam search calls this function after it has selected the beams that it continues. The caches
    of the source are the same for all beams and do not change.
    """

    def select_beams(cache: Float[Array, "B L N T H K"]) -> Float[Array, "B L N T H K"]:
        """Returns `cache` (the keys or the values of all beams) in the new order of beams: beam n
        gets the entries of the earlier beam that it continues.
        """
        return jnp.take_along_axis(cache, beams[:, None, :, None, None, None], axis=2)

    return state._replace(own=jax.tree.map(select_beams, state.own))


def readout(model: config.Seq2Seq, params: Params) -> Readout:
    """Returns the embedding, bias and scale with which `logits` maps hidden vectors to logits.

    Args:
      model: the settings of the model.
      params: the parameters of the model.
    """
    where = "token_embed" if model.tied_logits else "lm_head"
    scaled = model.family == "t5" and model.scale_logits
    bias = jax.lax.stop_gradient(params["logits_bias"]) if model.family == "bart" else None
    scale = model.model_dim**-0.5 if scaled else 1.0
    return Readout(params[where]["embedding"], bias, scale)


def logits(out: Readout, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Returns the float32 logits scale * hidden @ embedding.T + bias.

    Args:
      out: the scale, the embedding and the bias, from `readout`.
      hidden: the vectors of the tokens.
    """
    product = out.scale * transposed_product(hidden, out.embedding.astype(hidden.dtype))
    if out.bias is None:
        return product
    return product + out.bias.reshape((1,) * (product.ndim - 1) + out.bias.shape)


def extend_positions(params: Params, length: int, method: str = "copy") -> Params:
    """Returns BART's parameters with longer tables of position embeddings.

    The caller must set `Seq2Seq.max_positions` to `length`.

    Args:
      params: the parameters of the model.
      length: the new number of positions, not below the old one.
      method: "copy" repeats the table from its start (Longformer, Beltagy et al. 2020);
        "interpolate" stretches it by linear interpolation.

    Raises:
      ConfigError: the method is unknown, there would be fewer positions, or the model has no table
        of positions.
    """
    if "pos_embed" not in params["encoder"]:
        raise ConfigError("there are no positions to extend: only BART learns a table of them")
    sides = {}
    for side in ("encoder", "decoder"):
        sides[side] = {
            **params[side],
            "pos_embed": extended_position_table(params[side]["pos_embed"], length, method),
        }
    return {**params, **sides}


def extended_position_table(
    table: Float[Array | np.ndarray, "P D"], length: int, method: str
) -> Float[Array, "R D"]:
    """Returns a table of position embeddings for more tokens.

    The tables of BART and RoBERTa have P rows of width D. The first two rows belong to no position
    and are copied, so the result has R = `length` + 2 rows.

    Args:
      table: the old table.
      length: the new number of positions.
      method: "copy" or "interpolate"; see `extend_positions`.

    Raises:
      ConfigError: the method is unknown, or there would be fewer positions.
    """
    if method not in ("copy", "interpolate"):
        raise ConfigError(f"extend_positions knows 'copy' and 'interpolate', not {method!r}")
    table = np.asarray(table)
    longer = _extended(table[POSITION_OFFSET:], length, method)
    return jnp.asarray(np.concatenate([table[:POSITION_OFFSET], longer]), table.dtype)


def _extended(table: np.ndarray, length: int, method: str) -> np.ndarray:
    known = len(table)
    if length < known:
        raise ConfigError(
            f"{known} positions cannot be extended to {length}; a shorter source needs no change"
        )
    if method == "copy":
        return table[np.arange(length) % known]
    places = np.linspace(0, known - 1, length)
    low = np.minimum(places.astype(int), known - 2) if known > 1 else np.zeros(length, int)
    share = (places - low)[:, None]
    return table[low] * (1 - share) + table[np.minimum(low + 1, known - 1)] * share
