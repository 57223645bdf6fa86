"""Heads of encoders: for each task, a small module named `head` that reads the hidden vectors."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Encoder
from brt.layers.basic import ZEROS, dropout, parameter
from brt.layers.transformer.linear import Linear, Norm
from brt.layers.transformer.mlp import activated


class Ctc(nn.Module):
    """`out` [D, V + 1]: logits of connectionist temporal classification; the last one
    is the blank.
    """

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        m = self.model
        self.out = Linear((m.model_dim,), (m.vocab_size + 1,), ("embed", "vocab"))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """Returns the float32 logits of every vector, with C = V + 1 classes."""
        return self.out(hidden).astype(jnp.float32)


class Classification(nn.Module):
    """RoBERTa's head for whole sequences, which reads the first token: `dense`, tanh, `out`."""

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        m = self.model
        self.dense = Linear((m.model_dim,), (m.model_dim,), ("embed", None))
        self.out = Linear((m.model_dim,), (m.classes,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B C"]:
        """Returns the float32 logits of the classes."""
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
        self.out = Linear((self.model.model_dim,), (2,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T 2"]:
        """Returns the float32 logits of start and end over T positions; padding has the lowest
        number.
        """
        logits = self.out(hidden).astype(jnp.float32)
        return jnp.where(valid[..., None], logits, jnp.finfo(jnp.float32).min)


class MaskedLanguageModel(nn.Module):
    """RoBERTa's head: `dense`, the activation, `norm`, then the embedding and `logits_bias` [V].

    `brt.models.encoder.readout` computes the logits, so that they need not exist all at once.
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
        """Returns vectors whose products with the embedding are the logits."""
        return self.norm(activated(self.model.activation, self.dense(hidden)))
