"""Heads of encoders: small modules, one for each task, that map the encoder's hidden vectors to
logits. An encoder has one head, whose parameters have the name `head`.

A head has the fields `model`, the settings of the encoder, and `training`, which enables dropout.
The inputs of a head are hidden vectors `hidden` [B, T, D] for B rows of the batch, T positions and
the width D of the model, and the mask `valid` [B, T], which is False for padding.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Encoder
from brt.layers.basic import ZEROS, dropout, parameter
from brt.layers.transformer.linear import Linear, Norm
from brt.layers.transformer.mlp import activated


class Ctc(nn.Module):
    """The head for speech recognition by connectionist temporal classification (CTC).

    The linear layer `out` [D, V + 1] gives each position a logit for each of V tokens and for the
    blank, which is the last class.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        """Creates the linear layer to the classes."""
        m = self.model
        self.out = Linear((m.model_dim,), (m.vocab_size + 1,), ("embed", "vocab"))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """Returns the float32 logits of every vector, with C = V + 1 classes."""
        return self.out(hidden).astype(jnp.float32)


class Classification(nn.Module):
    """The head for classification of sequences, as in RoBERTa.

    The hidden vector of the first token passes through the linear layer `dense` [D, D], tanh, and
    the linear layer `out` [D, C] for C classes.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        """Creates the hidden layer and the linear layer to the classes."""
        m = self.model
        self.dense = Linear((m.model_dim,), (m.model_dim,), ("embed", None))
        self.out = Linear((m.model_dim,), (m.classes,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B C"]:
        """Returns the float32 logits of the C classes for each sequence."""
        rate = self.model.dropout
        x = jnp.tanh(self.dense(dropout(self, hidden[:, 0], rate)))
        return self.out(dropout(self, x, rate)).astype(jnp.float32)


class Spans(nn.Module):
    """The head for extractive question answering: a linear layer `out` [D, 2] gives each position a
    logit for the start and one for the end of the answer.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        """Creates the linear layer to the two logits of a position."""
        self.out = Linear((self.model.model_dim,), (2,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T 2"]:
        """Returns the float32 logits of each position for being the start and the end of the
        answer. Padding has the lowest finite number.
        """
        logits = self.out(hidden).astype(jnp.float32)
        return jnp.where(valid[..., None], logits, jnp.finfo(jnp.float32).min)


class MaskedLanguageModel(nn.Module):
    """The head for masked language modeling, as in RoBERTa.

    The hidden vectors pass through the linear layer `dense`, the activation and `norm`. The logits
    are the products of the result with the embeddings of the V tokens, plus `logits_bias` [V]. The
    loss computes the logits in chunks from `brt.models.encoder.readout`, because the logits of all
    positions would need much memory.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        """Creates the hidden layer, its norm and the bias of the logits."""
        m = self.model
        self.dense = Linear((m.model_dim,), (m.model_dim,), ("embed", None))
        self.norm = Norm("layer", m.norm_epsilon)
        self.logits_bias = parameter(self, "logits_bias", (m.vocab_size,), ("vocab",), ZEROS)

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns the vectors whose products with the token embeddings, plus `logits_bias`, are the
        logits.
        """
        return self.norm(activated(self.model.activation, self.dense(hidden)))
