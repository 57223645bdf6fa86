"""Heads of encoders: small modules, one for each task, that map the encoder's hidden vectors to
float32 logits. An encoder has one head, whose parameters have the name `head`.

The inputs of a head are the vectors `hidden` and the mask `valid`, which is False for padding.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Encoder
from brt.layers.basic import ZEROS, dropout, parameter
from brt.layers.transformer.linear import Linear, Norm
from brt.layers.transformer.mlp import activated


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
