"""Settings that distinguish the layers of the model families, and residual connections."""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt import config
from brt.distributed.rules import constrain
from brt.layers.basic import compute_dtype, dropout
from brt.layers.transformer.linear import DEVIATION, Linear, Norm


class Block(NamedTuple):
    """Sizes and settings of a layer.

    Attributes:
      norm: "rms" has a scale, "layer" a scale and a bias.
      norm_first: True normalises the input of each sub-layer, False the sum of input and output.
      bias: True if matrix products have a bias.
      deviation: standard deviation of initial matrices; None for fan_in ** -0.5.
      scale: scale of the products of queries and keys.
      dtype: dtype of activations and caches.
      kernels: implementations of operations.
    """

    model_dim: int
    heads: int
    head_dim: int
    mlp_dim: int
    activation: Literal["relu", "gelu", "gated_gelu"]
    norm: Literal["rms", "layer"]
    norm_epsilon: float
    norm_first: bool
    bias: bool
    deviation: float | None
    scale: float
    dropout: float
    attention_dropout: float
    activation_dropout: float
    dtype: jnp.dtype
    kernels: config.Kernels

    def linear(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str | None, ...],
        deviation: float | None = None,
    ) -> Linear:
        """Returns a module for a matrix product; `deviation` is used if the block names none."""
        return Linear(inputs, outputs, axes, self.bias, self.deviation or deviation)

    def new_norm(self) -> Norm:
        """Returns a norm for vectors of the model's width."""
        return Norm(self.norm, self.norm_epsilon)


def of_encoder(m: config.Encoder, kernels: config.Kernels) -> Block:
    """Returns the settings of RoBERTa's layers, or of encoders that normalise before sub-layers."""
    return Block(
        m.model_dim, m.heads, m.head_dim, m.mlp_dim, m.activation, "layer", m.norm_epsilon,
        m.norm_first, bias=True, deviation=None, scale=m.head_dim**-0.5, dropout=m.dropout,
        attention_dropout=_own(m.attention_dropout, m.dropout), activation_dropout=0.0,
        dtype=compute_dtype(m), kernels=kernels,
    )  # fmt: skip


def of_seq2seq(m: config.Seq2Seq, kernels: config.Kernels) -> Block:
    """Returns the settings of T5's or BART's layers; T5 does not scale its queries."""
    t5 = m.family == "t5"
    return Block(
        m.model_dim, m.heads, m.head_dim, m.mlp_dim, m.activation, "rms" if t5 else "layer",
        m.norm_epsilon, norm_first=t5, bias=not t5, deviation=None if t5 else DEVIATION,
        scale=1.0 if t5 else m.head_dim**-0.5, dropout=m.dropout,
        attention_dropout=_own(m.attention_dropout, m.dropout),
        activation_dropout=_own(m.activation_dropout, m.dropout), dtype=compute_dtype(m),
        kernels=kernels,
    )  # fmt: skip


def _own(rate: float, usual: float) -> float:
    return usual if rate == -1 else rate


class Residual(nn.Module):
    """A layer whose sub-layers have residual connections: each one reads `before(x)`, and `after`
    adds its output.
    """

    block: Block
    training: bool = False

    def before(self, norm: Norm, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Returns the input of a sub-layer."""
        return norm(x) if self.block.norm_first else x

    def after(
        self, norm: Norm, x: Float[Array, "*B D"], y: Float[Array, "*B D"]
    ) -> Float[Array, "*B D"]:
        """Returns the sum of x and the output y of a sub-layer."""
        total = x + dropout(self, y, self.block.dropout)
        total = constrain(total, "lanes", *["tokens"] * (x.ndim - 2), None)
        return total if self.block.norm_first else norm(total)
