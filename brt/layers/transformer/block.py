"""Settings that distinguish the layers of RoBERTa, T5 and BART, and a base class of layers with
residual connections. In shapes, *B stands for any leading axes.
"""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt import config
from brt.distributed.rules import constrain
from brt.layers.basic import compute_dtype, dropout
from brt.layers.transformer.linear import DEVIATION, Linear, Norm


class Block(NamedTuple):
    """Sizes and settings of a layer."""

    model_dim: int
    heads: int
    head_dim: int
    mlp_dim: int
    activation: Literal["relu", "gelu", "gated_gelu"]  # gated_gelu has a second projection.
    norm: Literal["rms", "layer"]
    norm_epsilon: float
    # True normalises the input of each sub-layer, False the sum of its input and output.
    norm_first: bool
    bias: bool  # True if matrix products have a bias.
    # The standard deviation of initial matrices; None for fan_in ** -0.5.
    deviation: float | None
    scale: float  # The factor of the products of queries and keys.
    dropout: float  # Of embeddings and of the outputs of sub-layers.
    attention_dropout: float
    activation_dropout: float  # Of the MLP's hidden features.
    dtype: jnp.dtype  # Of activations and caches.
    kernels: config.Kernels

    def linear(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str | None, ...],
        deviation: float | None = None,
    ) -> Linear:
        """Returns a module that maps axes of the sizes `inputs` to axes of the sizes `outputs`.
        `deviation` is the standard deviation of its initial kernel if that of the block is None.
        """
        return Linear(inputs, outputs, axes, self.bias, self.deviation or deviation)

    def new_norm(self) -> Norm:
        return Norm(self.norm, self.norm_epsilon)


def of_encoder(m: config.Encoder, kernels: config.Kernels) -> Block:
    """Returns the settings of an encoder's layers; RoBERTa's have `m.norm_first` = False."""
    return Block(
        m.model_dim, m.heads, m.head_dim, m.mlp_dim, m.activation, "layer", m.norm_epsilon,
        m.norm_first, bias=True, deviation=None, scale=m.head_dim**-0.5, dropout=m.dropout,
        attention_dropout=_own(m.attention_dropout, m.dropout), activation_dropout=0.0,
        dtype=compute_dtype(m), kernels=kernels,
    )  # fmt: skip


def of_seq2seq(m: config.Seq2Seq, kernels: config.Kernels) -> Block:
    """Returns the settings of T5's or BART's layers."""
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
    """Base class of layers whose sub-layers (attention and MLP) have residual connections.

    For a sub-layer f with a norm, a layer computes y = f(before(norm, x)) and then x = after(norm,
    x, y).
    """

    block: Block
    training: bool = False

    def before(self, norm: Norm, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return norm(x) if self.block.norm_first else x

    def after(
        self, norm: Norm, x: Float[Array, "*B D"], y: Float[Array, "*B D"]
    ) -> Float[Array, "*B D"]:
        total = x + dropout(self, y, self.block.dropout)
        total = constrain(total, "lanes", *["tokens"] * (x.ndim - 2), None)
        return total if self.block.norm_first else norm(total)
