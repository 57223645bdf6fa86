"""Encoder-decoders: T5 (1.0, 1.1), LongT5's encoders and BART as settings of one model.

Training calls `encode`, then `decode` over whole targets. Generation calls `encode` and `prefill`
once, and then `step` for each token of all beams. The encoded source and everything computed from
it exist once for each source, not once for each beam.

In shapes, B is the number of sources, S the number of tokens of a source, T the number of tokens of
a target, N the number of beams of a source, L the number of layers, and V the size of the
vocabulary. Masks are False for padding, which is at the end of a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt import config
from brt.errors import ConfigError
from brt.layers.basic import ZEROS, compute_dtype, parameter
from brt.layers.seq2seq import Decoder, Encoder, Metrics, SelfCache
from brt.layers.transformer import DEVIATION, POSITION_OFFSET, Embedding
from brt.ops.cross_attention import CrossCache
from brt.ops.products import transposed_product

Params = dict[str, Any]


IGNORED = -100  # The loss ignores tokens with this label, as in Hugging Face datasets.


class SpecialTokens(NamedTuple):
    """Token ids. In T5, pad and start are 0, and eos is 1. In BART, bos is 0, pad is 1, and start
    and eos are 2.
    """

    pad: int
    start: int  # The first input of the decoder.
    eos: int  # At the end of sources and targets.
    bos: int | None = None  # At the beginning of sources and targets, if they have one.
    forced_bos: int | None = None  # Generation must write this id first.
    forced_eos: int | None = None  # Generation must write this id at the maximum length.
    ends: tuple[int, ...] = ()  # Further ids that end a generated text, as `eos` does.

    @property
    def stops(self) -> Int[np.ndarray, " E"]:
        return np.array((self.eos, *self.ends), np.int32)


def shift_right(
    labels: Int[Array | np.ndarray, "B T"], special: SpecialTokens
) -> Int[np.ndarray, "B T"]:
    """Returns the inputs of the decoder: the start token, and then all labels but the last. Labels
    are the tokens that the decoder has to predict: `... </s>` for T5, and `<s> ... </s>` for BART.
    Ignored labels become padding.
    """
    labels = np.asarray(labels)
    start = np.full_like(labels[:, :1], special.start)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORED, special.pad, shifted)


class DecodeState(NamedTuple):
    """The state that generation carries from token to token."""

    position: Int[Array, ""]  # The number of target tokens read so far, the same for all beams.
    own: SelfCache  # For self-attention.
    source: CrossCache  # For cross-attention; all beams of a source share it.


class Decoded(NamedTuple):
    """The result of reading whole targets."""

    hidden: Float[Array, "B T D"]  # `logits` maps these vectors to the logits of the next tokens.
    # Scalars to log, means over the layers. If the cross-attention has accumulate-and-fire neurons,
    # they are `firing_rate`, `leak` and `threshold`. Without such neurons, there are none.
    metrics: Metrics


class Readout(NamedTuple):
    """The map from hidden vectors to logits: scale * hidden @ embedding.T + bias."""

    embedding: Float[Array, "V D"]
    bias: Float[Array, " V"] | None  # A constant, because BART does not train it.
    scale: float


class Seq2Seq(nn.Module):
    """An encoder-decoder. `attention` has the settings of the encoder's self-attention; parameters
    do not depend on these settings. Training needs the rng 'dropout'.
    """

    model: config.Seq2Seq
    cross: config.CrossAttention = config.CrossAttention()
    training: bool = False
    attention: config.Attention = config.Attention()
    kernels: config.Kernels = config.Kernels()

    def setup(self) -> None:
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
        if self.is_initializing() and not self.model.tied_logits:
            # Initialization has to call all modules. No other method calls `lm_head`, because the
            # function `readout` reads the parameters of `lm_head` directly.
            self.lm_head(targets_in)
        return self.decode(self.encode(source, mask, key), mask, targets_in)

    def encode(
        self, source: Int[Array, "B S"], mask: Bool[Array, "B S"], key: jax.Array | None = None
    ) -> Float[Array, "B S D"]:
        """Returns the encoder's outputs. `key` is for kinds of attention with random numbers."""
        key = jax.random.key(0) if key is None else key
        return self.encoder(self.token_embed(source), mask, key)

    def decode(
        self,
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        targets_in: Int[Array, "B T"],
    ) -> Decoded:
        """Reads whole targets: the start token, then the target without its last token."""
        return Decoded(*self.decoder(self.token_embed(targets_in), encoded, mask))

    def prefill(
        self,
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        beams: int,
        max_length: int,
    ) -> DecodeState:
        """Returns the state before the first token. The state has room for `max_length` tokens,
        including the start token.
        """
        own = self.decoder.new_cache(encoded.shape[0], beams, max_length)
        return DecodeState(jnp.zeros((), jnp.int32), own, self.decoder.prefill(encoded, mask))

    def step(
        self, tokens: Int[Array, "B N"], state: DecodeState
    ) -> tuple[Float[Array, "B N D"], DecodeState]:
        """Reads a token of every beam; returns the tokens' hidden vectors and the next state."""
        x = self.token_embed(tokens)
        x, own, source = self.decoder.step(x, state.own, state.source, state.position)
        return x, DecodeState(state.position + 1, own, source)


def init(network: Seq2Seq, key: Array) -> Params:
    """Returns initial parameters, each in a Flax box with the names of its axes, for sharding."""
    tokens, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return network.init(key, tokens, mask, tokens)["params"]


def _calling(method: str) -> Callable[..., Any]:
    """Returns a function that calls a method of `Seq2Seq`, without dropout. Its arguments are the
    network, the parameters, and the arguments of the method.
    """

    def call(network: Seq2Seq, params: Params, *inputs: Any) -> Any:
        return network.apply({"params": params}, *inputs, method=method)

    return call


encode, decode, prefill = map(_calling, ("encode", "decode", "prefill"))


def step(
    network: Seq2Seq, params: Params, tokens: Int[Array, "B N"], state: DecodeState
) -> tuple[Float[Array, "B N V"], DecodeState]:
    """Reads a token of every beam; returns float32 logits of the following token, and the state."""
    hidden, state = _calling("step")(network, params, tokens, state)
    return logits(readout(network.model, params), hidden), state


def reorder(state: DecodeState, beams: Int[Array, "B N"]) -> DecodeState:
    """Returns the state in which beam n of source b continues the earlier beam `beams[b, n]`."""

    def select_beams(cache: Float[Array, "B L N T H K"]) -> Float[Array, "B L N T H K"]:
        return jnp.take_along_axis(cache, beams[:, None, :, None, None, None], axis=2)

    return state._replace(own=jax.tree.map(select_beams, state.own))


def readout(model: config.Seq2Seq, params: Params) -> Readout:
    """Returns the embedding, bias and scale with which `logits` maps hidden vectors to logits."""
    where = "token_embed" if model.tied_logits else "lm_head"
    scaled = model.family == "t5" and model.scale_logits
    bias = jax.lax.stop_gradient(params["logits_bias"]) if model.family == "bart" else None
    scale = model.model_dim**-0.5 if scaled else 1.0
    return Readout(params[where]["embedding"], bias, scale)


def logits(out: Readout, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    product = out.scale * transposed_product(hidden, out.embedding.astype(hidden.dtype))
    if out.bias is None:
        return product
    return product + out.bias.reshape((1,) * (product.ndim - 1) + out.bias.shape)


def extend_positions(params: Params, length: int, method: str = "copy") -> Params:
    """Returns BART's parameters with tables of `length` positions. The caller must then also set
    `Seq2Seq.max_positions` to `length`.

    The method "copy" repeats the table from its start (Longformer, Beltagy et al. 2020), and
    "interpolate" stretches the table by linear interpolation.
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
    """Extends a table of positions (see `extend_positions`). Both the given table, of P rows, and
    the result, of R rows, begin with two unused rows. `length` positions follow them in the result.
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


def seq2seq_flops(
    model: config.Seq2Seq, cross: config.CrossAttention, source: int, target: int
) -> int | None:
    """Returns the FLOPs of the forward pass of an encoder-decoder, including the logits, for one
    pair of a source and a target of these lengths. Returns None if the FLOPs are not known for the
    kind of cross-attention. Only matrix products count.

    Self-attention is counted as attention to all tokens. However, if each token of the encoder
    attends to a window around itself (LongT5), only the keys in the window are counted.
    """
    size, segment = model.head_dim, min(cross.segment_size, source)
    # Multiply-adds per channel. In srformer, source tokens are summed into states for targets.
    attention = {
        "full": 2 * target * source,
        "segmented": 2 * target * segment,
        "srformer": 2 * target * segment + 2 * source * size + target * size,
    }.get(cross.kind)
    if attention is None:
        return None
    d, width = model.model_dim, model.heads * model.head_dim
    projections = 4 * 2 * d * width
    mlp = (6 if model.activation == "gated_gelu" else 4) * d * model.mlp_dim
    seen = source
    if model.encoder_attention != "full":
        seen = min(source, 2 * model.encoder_radius + 1)
    encoder = source * model.encoder_layers * (projections + 4 * seen * width + mlp)
    # The decoder's cross-attention projects the source to keys and values.
    of_source = source * projections // 2
    of_target = target * (projections + projections // 2 + 4 * target * width + mlp)
    of_target += 2 * attention * width
    logits = 2 * target * d * model.vocab_size
    return encoder + model.decoder_layers * (of_source + of_target) + logits
