"""Settings that distinguish the layers of RoBERTa, T5 and BART, and a base class of layers with
residual connections.

In shapes, *B stands for any leading axes, and D is the width of the model.
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
    """Sizes and settings of a layer.

    Attributes:
      model_dim: the number of features of a token's vector.
      heads, head_dim: the number of heads and the size of a head.
      mlp_dim: the number of hidden features of the MLP.
      activation: the activation of the MLP; "gated_gelu" multiplies by a second projection.
      norm: "rms" is a root-mean-square norm with a scale, and "layer" a layer norm with a scale and
        a bias.
      norm_epsilon: the number that the norm adds to the mean square or to the variance.
      norm_first: True normalises the input of each sub-layer; False normalises the sum of a
        sub-layer's input and output.
      bias: True if matrix products have a bias.
      deviation: the standard deviation of initial matrices; None for fan_in ** -0.5.
      scale: the factor of the products of queries and keys.
      dropout: the dropout rate of embeddings and of the outputs of sub-layers.
      attention_dropout, activation_dropout: the dropout rates of attention weights and of the MLP's
        hidden features.
      dtype: the dtype of activations and caches.
      kernels: the names of the implementations of operations.
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
        """Returns a `Linear` module that maps axes of the sizes `inputs` to axes of the sizes
        `outputs`.

        Args:
          inputs, outputs: the sizes of the kernel's input axes and of its output axes.
          axes: the names of all axes of the kernel, by which it is sharded.
          deviation: the standard deviation of the initial kernel if `Block.deviation` is None.
        """
        return Linear(inputs, outputs, axes, self.bias, self.deviation or deviation)

    def new_norm(self) -> Norm:
        """Returns a norm for vectors of the model's width."""
        return Norm(self.norm, self.norm_epsilon)


def of_encoder(m: config.Encoder, kernels: config.Kernels) -> Block:
    """Returns the settings of an encoder's layers; with `m.norm_first` = False, these are RoBERTa's
    layers.

    Args:
      m: the settings of the encoder.
      kernels: the names of the implementations of operations.
    """
    return Block(
        m.model_dim, m.heads, m.head_dim, m.mlp_dim, m.activation, "layer", m.norm_epsilon,
        m.norm_first, bias=True, deviation=None, scale=m.head_dim**-0.5, dropout=m.dropout,
        attention_dropout=_own(m.attention_dropout, m.dropout), activation_dropout=0.0,
        dtype=compute_dtype(m), kernels=kernels,
    )  # fmt: skip


def of_seq2seq(m: config.Seq2Seq, kernels: config.Kernels) -> Block:
    """Returns the settings of T5's or BART's layers.

    Args:
      m: the settings of the encoder-decoder, whose field `family` is "t5" or "bart".
      kernels: the names of the implementations of operations.
    """
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

    For a sub-layer f with a norm, a layer computes y = f(before(norm, x)) and then
    x = after(norm, x, y).

    Attributes:
      block: sizes and settings of the layer.
      training: True applies dropout.
    """

    block: Block
    training: bool = False

    def before(self, norm: Norm, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Returns the input of a sub-layer: norm(x) if `Block.norm_first` is True, otherwise x."""
        return norm(x) if self.block.norm_first else x

    def after(
        self, norm: Norm, x: Float[Array, "*B D"], y: Float[Array, "*B D"]
    ) -> Float[Array, "*B D"]:
        """Returns the sum of x and dropout(y), where y is the output of a sub-layer. If
        `Block.norm_first` is False, the sum is normalised by `norm`.
        """
        total = x + dropout(self, y, self.block.dropout)
        total = constrain(total, "lanes", *["tokens"] * (x.ndim - 2), None)
        return total if self.block.norm_first else norm(total)
