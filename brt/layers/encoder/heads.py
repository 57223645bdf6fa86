"""What reads an encoder's hidden vectors: for each task, a small module named `head`."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Encoder
from brt.layers.basic import ZEROS, dropout, parameter
from brt.layers.transformer.linear import Linear, Norm
from brt.layers.transformer.mlp import activated


class Ctc(nn.Module):
    """`out` [D, V + 1]: tokens of connectionist temporal classification; the last is the blank."""

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        m = self.model
        self.out = Linear((m.model_dim,), (m.vocab_size + 1,), ("embed", "vocab"))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """Float32 logits of every vector; C = V + 1."""
        return self.out(hidden).astype(jnp.float32)


class Classification(nn.Module):
    """RoBERTa's of whole sequences, which it reads at their first token: `dense`, tanh, `out`."""

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        m = self.model
        self.dense = Linear((m.model_dim,), (m.model_dim,), ("embed", None))
        self.out = Linear((m.model_dim,), (m.classes,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B C"]:
        """Float32 logits of the classes."""
        rate = self.model.dropout
        x = jnp.tanh(self.dense(dropout(self, hidden[:, 0], rate)))
        return self.out(dropout(self, x, rate)).astype(jnp.float32)


class Spans(nn.Module):
    """`out` [D, 2]: where a span of the sequence starts, and where it ends."""

    model: Encoder
    training: bool = False

    def setup(self) -> None:
        self.out = Linear((self.model.model_dim,), (2,), ("embed", None))

    def __call__(
        self, hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B T 2"]:
        """Float32 logits of start and end, over T; the lowest number there is on padding."""
        logits = self.out(hidden).astype(jnp.float32)
        return jnp.where(valid[..., None], logits, jnp.finfo(jnp.float32).min)


class MaskedLanguageModel(nn.Module):
    """RoBERTa's: `dense`, the activation, `norm`, then the embedding and `logits_bias` [V].

    The logits are left to `brt.models.encoder.readout`, so that they need not all exist.
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
        """Vectors whose products with the embedding are logits."""
        return self.norm(activated(self.model.activation, self.dense(hidden)))
