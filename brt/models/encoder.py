"""Encoders from tokens or feature vectors to hidden vectors, with a head for each task.

All kinds of attention (exact, clustered, ...) have the same parameters, so weights trained with one
kind can be used with any other. In shapes, B is the number of rows of the batch, T the padded
number of inputs of a row, and F the number of features of an input.
"""

from functools import reduce
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt import config
from brt.errors import ConfigError
from brt.layers.basic import ZEROS, compute_dtype, dropout, parameter
from brt.layers.transformer import (
    DEVIATION,
    POSITION_OFFSET,
    Embedding,
    EncoderLayer,
    Linear,
    Norm,
    SharedInputs,
    activated,
    layer_keys,
    of_encoder,
    stacked,
)
from brt.models.seq2seq import Readout

Params = dict[str, Any]
Task = Literal["ctc", "classification", "regression", "spans", "masked_language_modeling"]
CONVOLUTION_WIDTH = 15  # The convolution of positions reads this many neighbouring tokens.


class Inputs(nn.Module):
    """A module that maps tokens or feature vectors to the input of an encoder's first layer.

    The module adds up embeddings of tokens (or projections of feature vectors), of token types and
    of positions, and normalizes the sum.

    Convolutional positions (wav2vec 2.0, Baevski et al. 2020, section 2; here without an
    activation) mix each token with its neighbours. The mixture depends on the order of tokens, but
    not on their absolute positions.
    """

    model: config.Encoder
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

        `inputs` are int32 tokens, or feature vectors of width F. If `types` is None, all types of
        tokens are 0.
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


def depthwise_convolution(
    x: Float[Array, "B T D"], kernel: Float[Array, "W D"]
) -> Float[Array, "B T D"]:
    """Returns y, the convolution of each channel of x with its own column of the kernel:

    y[t] = sum over w of kernel[w] x[t + w - (W - 1) / 2]. Outside the sequence, x is 0. W is odd.
    """
    width, tokens = len(kernel), x.shape[1]
    half = width // 2
    padded = jnp.pad(x, ((0, 0), (half, half), (0, 0)))
    rows = kernel.astype(x.dtype)[:, None, None]
    # XLA's CPU backend takes many times longer for a grouped convolution than for W products.
    return reduce(jnp.add, (rows[w] * padded[:, w : w + tokens] for w in range(width)))


def sinusoids(length: int, width: int) -> Float[np.ndarray, "T D"]:
    """Returns the sinusoidal vectors (Vaswani et al. 2017, section 3.5) of positions from 0 on:
    first all sines, then all cosines, scaled so that the mean square of the numbers is 1.
    """
    speeds = 10_000.0 ** (-np.arange(width // 2) / (width // 2))
    angles = np.outer(np.arange(length), speeds)
    both = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return (np.sqrt(2) * both).astype(np.float32)


def check_inputs(model: config.Encoder, inputs: Array) -> None:
    """Raises ConfigError if a model cannot read inputs of this kind, width or number."""
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


class Head(nn.Module):
    """Base class of the heads of encoders, one for each task. A head maps the vectors `hidden` to
    its outputs, which are float32 logits for most tasks. The mask `valid` is False for padding.
    """

    model: config.Encoder
    training: bool = False


class Ctc(Head):
    """The head for speech recognition by connectionist temporal classification (CTC): each position
    gets a logit for each of V tokens and for the blank, which is the last of C = V + 1 classes.
    """

    def setup(self) -> None:
        m = self.model
        self.out = Linear((m.model_dim,), (m.vocab_size + 1,), ("embed", "vocab"))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        return self.out(hidden).astype(jnp.float32)


class Classification(Head):
    """The head for classification of sequences, as in RoBERTa: the hidden vector of the first token
    passes through the linear layer `dense`, tanh, and the linear layer `out`.
    """

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


class Spans(Head):
    """The head for extractive question answering: each position gets a logit for the start and one
    for the end of the answer. The logits of padding are the lowest finite number.
    """

    def setup(self) -> None:
        self.out = Linear((self.model.model_dim,), (2,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T 2"]:
        logits = self.out(hidden).astype(jnp.float32)
        return jnp.where(valid[..., None], logits, jnp.finfo(jnp.float32).min)


class MaskedLanguageModel(Head):
    """The head for masked language modeling, as in RoBERTa. It returns the vectors whose products
    with the embeddings of the V tokens, plus `logits_bias`, are the logits.

    The loss computes the logits in chunks, with the weights that `readout` returns, because the
    logits of all positions would need much memory.
    """

    def setup(self) -> None:
        m = self.model
        self.dense = Linear((m.model_dim,), (m.model_dim,), ("embed", None))
        self.norm = Norm("layer", m.norm_epsilon)
        self.logits_bias = parameter(self, "logits_bias", (m.vocab_size,), ("vocab",), ZEROS)

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        return self.norm(activated(self.model.activation, self.dense(hidden)))


HEADS = {
    "ctc": Ctc,
    "classification": Classification,
    "regression": Classification,  # The head has one class, whose logit is the prediction.
    "spans": Spans,
    "masked_language_modeling": MaskedLanguageModel,
}


class Encoder(nn.Module):
    """An encoder that maps tokens or feature vectors to hidden vectors.

    The groups of parameters are `inputs` (embeddings and positions), `layers` (stacked on axis 0)
    and, if each layer normalises its input, `final_norm`. Training needs the rng 'dropout'.
    """

    model: config.Encoder
    attention: config.Attention = config.Attention()
    training: bool = False
    kernels: config.Kernels = config.Kernels()

    def setup(self) -> None:
        m = self.model
        self.inputs = Inputs(m, self.training)
        block = of_encoder(m, self.kernels)
        self.layers = stacked(EncoderLayer, m.layers, remat=m.remat)(
            block, self.training, self.attention, shared_queries_keys=m.shared_queries_keys
        )
        if m.norm_first:
            self.final_norm = block.new_norm()

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B T F"],
        valid: Bool[Array, "B T"],
        key: jax.Array,
        types: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns a hidden vector for each input; the vectors at padding have no meaning.

        The vectors of a row depend only on the row's valid inputs and on the key, which is for
        kinds of attention that draw random numbers. Evaluation should use a fixed key.
        """
        x = self.inputs(inputs, valid, types)
        x, _ = self.layers(x, layer_keys(key, self.model.layers), SharedInputs(valid))
        return self.final_norm(x) if self.model.norm_first else x


class EncoderWithHead(nn.Module):
    """An encoder and the head of a task. Their parameters are called `encoder` and `head`."""

    model: config.Encoder
    attention: config.Attention = config.Attention()
    task: Task = "masked_language_modeling"
    training: bool = False
    kernels: config.Kernels = config.Kernels()

    def setup(self) -> None:
        self.encoder = Encoder(self.model, self.attention, self.training, self.kernels)
        self.head = HEADS[self.task](self.model, self.training)

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B T F"],
        valid: Bool[Array, "B T"],
        key: jax.Array,
        types: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "..."]:
        """Returns the output of the task's head, whose shape depends on the task."""
        return self.head(self.encoder(inputs, valid, key, types), valid)

    def head_at_positions(
        self,
        inputs: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        key: jax.Array,
        positions: Int[Array, "B R"],
    ) -> Float[Array, "B R D"]:
        """Returns the vectors that the head computes for the tokens at R `positions` of each row.

        Masked language modeling calls this method instead of `__call__`, because its loss needs
        only the masked tokens. The head is then not computed for the other tokens.
        """
        hidden = self.encoder(inputs, valid, key)
        chosen = jnp.take_along_axis(hidden, positions[..., None], axis=1)
        return self.head(chosen, jnp.take_along_axis(valid, positions, axis=1))


def init(network: Encoder | EncoderWithHead, key: Array) -> Params:
    """Returns initial parameters, each in a Flax box with the names of its axes, for sharding."""
    features = network.model.features
    inputs = jnp.zeros((1, 1, features)) if features else jnp.zeros((1, 1), jnp.int32)
    return network.init(key, inputs, jnp.ones((1, 1), bool), key)["params"]


def readout(params: Params) -> Readout:
    """Returns the map from the vectors of the head `MaskedLanguageModel` to logits."""
    embedding = params["encoder"]["inputs"]["token_embed"]["embedding"]
    return Readout(embedding, params["head"]["logits_bias"], 1.0)


def encoder_flops(model: config.Encoder, length: int) -> int:
    """Returns the FLOPs of an encoder without a head, with exact attention, for one sequence.
    Only matrix products are counted.
    """
    width = model.model_dim
    projections = (3 if model.shared_queries_keys else 4) * 2 * width * width
    attention, mlp = 4 * length * width, 4 * width * model.mlp_dim
    features = 2 * model.features * width
    return length * (model.layers * (projections + attention + mlp) + features)
