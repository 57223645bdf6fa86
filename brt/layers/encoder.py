"""Inputs and heads of bidirectional encoders such as RoBERTa."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt.config import Encoder
from brt.errors import ConfigError
from brt.layers.basic import ZEROS, compute_dtype, dropout, parameter
from brt.layers.transformer import DEVIATION, POSITION_OFFSET, Embedding, Linear, Norm, activated
from brt.ops.depthwise_convolution import depthwise_convolution

CONVOLUTION_WIDTH = 15  # The convolution of positions reads this many neighbouring tokens.


# The input of an encoder: the sum of the embeddings of tokens (or projections of feature vectors),
# of token types and of positions.


class Inputs(nn.Module):
    """A module that maps tokens or feature vectors to the input of an encoder's first layer.

    Convolutional positions (wav2vec 2.0, Baevski et al. 2020, section 2; here without an
    activation) mix each token with its neighbours. The mixture depends on the order of tokens, but
    not on their absolute positions.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        m = self.model
        if m.features:
            self.feature_proj = Linear((m.features,), (m.model_dim,), (None, "embed"))
        else:
            self.token_embed = self._embedding(m.vocab_size, "vocab")
        if m.token_types:
            self.type_embed = self._embedding(m.token_types, "types")
        if m.positions == "learned":
            self.pos_embed = parameter(
                self, "pos_embed", (m.max_positions + POSITION_OFFSET, m.model_dim),
                ("positions", "embed"), nn.initializers.normal(DEVIATION),
            )  # fmt: skip
        if m.positions == "convolution":
            self.pos_conv = parameter(
                self, "pos_conv", (CONVOLUTION_WIDTH, m.model_dim), (None, "embed"),
                nn.initializers.normal(CONVOLUTION_WIDTH**-0.5),
            )  # fmt: skip
        self.embed_norm = Norm("layer", m.norm_epsilon)

    def _embedding(self, rows: int, axis: str) -> Embedding:
        m = self.model
        return Embedding((rows, m.model_dim), (axis, "embed"), DEVIATION, compute_dtype(m))

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B T F"],
        valid: Bool[Array, "B T"],
        types: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the input of the first layer, with zeros for padding.

        `inputs` are int32 tokens, or feature vectors of width F; without `types`, all types are 0.
        """
        m = self.model
        check_inputs(m, inputs)
        dtype = compute_dtype(m)
        x = self.feature_proj(inputs.astype(dtype)) if m.features else self.token_embed(inputs)
        if m.token_types:
            x = x + self.type_embed(jnp.zeros_like(inputs) if types is None else types)
        if m.positions == "convolution":
            x = x + depthwise_convolution(jnp.where(valid[..., None], x, 0), self.pos_conv)
        elif m.positions != "none":
            # Positions count valid tokens only, so padding does not shift the tokens after it.
            places = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
            x = x + jnp.take(self._positions(inputs.shape[1]), places, axis=0).astype(dtype)
        x = dropout(self, self.embed_norm(x), m.dropout)
        return jnp.where(valid[..., None], x, 0)

    def _positions(self, length: int) -> Float[Array, "P D"]:
        m = self.model
        if m.positions == "learned":
            return self.pos_embed[POSITION_OFFSET:]
        # Sinusoidal positions are scaled to the standard deviation of the inputs they are added to.
        size = 1.0 if m.features else DEVIATION
        return jnp.asarray(size * sinusoids(length, m.model_dim))


def sinusoids(length: int, width: int) -> Float[np.ndarray, "T D"]:
    """Returns the sinusoidal vectors (Vaswani et al. 2017, section 3.5) of positions from 0 on:
    first all sines, then all cosines, scaled so that the mean square of the numbers is 1.
    """
    speeds = 10_000.0 ** (-np.arange(width // 2) / (width // 2))
    angles = np.outer(np.arange(length), speeds)
    both = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return (np.sqrt(2) * both).astype(np.float32)


def check_inputs(model: Encoder, inputs: Array) -> None:
    """Raises ConfigError for inputs of another kind or width, or beyond the learned positions."""
    if model.features and (inputs.ndim != 3 or inputs.shape[-1] != model.features):
        raise ConfigError(
            f"inputs are {inputs.dtype} {inputs.shape}, but the encoder reads vectors of width "
            f"{model.features}"
        )
    if not model.features and inputs.ndim != 2:
        raise ConfigError(
            f"inputs are vectors of width {inputs.shape[-1]}, but the encoder reads tokens"
        )
    if model.positions == "learned" and inputs.shape[1] > model.max_positions:
        raise ConfigError(
            f"{inputs.shape[1]} inputs are more than Model.max_positions = "
            f"{model.max_positions}; raise that, or set Model.positions = 'sinusoidal'"
        )


# Heads of encoders: small modules, one for each task, that map the encoder's hidden vectors to
# float32 logits. An encoder has one head, whose parameters have the name `head`.
#
# The inputs of a head are the vectors `hidden` and the mask `valid`, which is False for padding.


class Ctc(nn.Module):
    """The head for speech recognition by connectionist temporal classification (CTC): each position
    gets a logit for each of V tokens and for the blank, which is the last of C = V + 1 classes.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        m = self.model
        self.out = Linear((m.model_dim,), (m.vocab_size + 1,), ("embed", "vocab"))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        return self.out(hidden).astype(jnp.float32)


class Classification(nn.Module):
    """The head for classification of sequences, as in RoBERTa: the hidden vector of the first token
    passes through the linear layer `dense`, tanh, and the linear layer `out`.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        m = self.model
        self.dense = Linear((m.model_dim,), (m.model_dim,), ("embed", None))
        self.out = Linear((m.model_dim,), (m.classes,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B C"]:
        rate = self.model.dropout
        x = jnp.tanh(self.dense(dropout(self, hidden[:, 0], rate)))
        return self.out(dropout(self, x, rate)).astype(jnp.float32)


class Spans(nn.Module):
    """The head for extractive question answering: each position gets a logit for the start and one
    for the end of the answer. Padding has the lowest finite number.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        self.out = Linear((self.model.model_dim,), (2,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T 2"]:
        logits = self.out(hidden).astype(jnp.float32)
        return jnp.where(valid[..., None], logits, jnp.finfo(jnp.float32).min)


class MaskedLanguageModel(nn.Module):
    """The head for masked language modeling, as in RoBERTa. It returns the vectors whose products
    with the embeddings of the V tokens, plus `logits_bias`, are the logits.

    The loss computes the logits in chunks from `brt.models.encoder.readout`, because the logits of
    all positions would need much memory.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        m = self.model
        self.dense = Linear((m.model_dim,), (m.model_dim,), ("embed", None))
        self.norm = Norm("layer", m.norm_epsilon)
        self.logits_bias = parameter(self, "logits_bias", (m.vocab_size,), ("vocab",), ZEROS)

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        return self.norm(activated(self.model.activation, self.dense(hidden)))
