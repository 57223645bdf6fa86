"""Encoders from tokens or feature vectors to hidden vectors, with a head for each task.

All kinds of attention (exact, clustered, ...) have the same parameters, so weights trained with one
kind can be used with any other. In shapes, B is the number of rows of the batch, T the padded
number of inputs of a row, and F the number of features of an input.
"""

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt import config
from brt.layers import encoder
from brt.layers.encoder import Inputs
from brt.layers.transformer import EncoderLayer, SharedInputs, layer_keys, of_encoder, stacked
from brt.models.seq2seq import Readout

Params = dict[str, Any]
Task = Literal["ctc", "classification", "regression", "spans", "masked_language_modeling"]
HEADS = {
    "ctc": encoder.Ctc,
    "classification": encoder.Classification,
    "regression": encoder.Classification,  # The head has one class, whose logit is the prediction.
    "spans": encoder.Spans,
    "masked_language_modeling": encoder.MaskedLanguageModel,
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
    """An encoder and the head of a task, whose parameters have the names `encoder` and `head`."""

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
    """Returns the map from the masked language modeling head's vectors to logits."""
    embedding = params["encoder"]["inputs"]["token_embed"]["embedding"]
    return Readout(embedding, params["head"]["logits_bias"], 1.0)
