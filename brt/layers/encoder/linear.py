"""What owns a matrix, an embedding or a norm."""

import math

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Encoder
from brt.layers.basic import ONES, compute_dtype, parameter
from brt.ops.dense import dense
from brt.ops.normalization import layer_norm

DEVIATION = 0.02  # of initial embeddings and learned positions, as RoBERTa's
ZEROS = nn.initializers.zeros


class Linear(nn.Module):
    """`kernel` [*inputs, *outputs] and `bias` [*outputs].

    Attributes:
      axes: logical names of the kernel's axes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str | None, ...]

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """[..., *inputs] -> [..., *outputs] in x's dtype."""
        rows = x.shape[: x.ndim - len(self.inputs)]
        width = math.prod(self.inputs)  # spelt out: there may be no rows
        init = nn.initializers.normal(width**-0.5)
        kernel = parameter(self, "kernel", (*self.inputs, *self.outputs), self.axes, init)
        flat = kernel.reshape(width, math.prod(self.outputs))
        y = dense(x.reshape(*rows, width), flat).reshape(*rows, *self.outputs)
        bias = parameter(self, "bias", self.outputs, self.axes[len(self.inputs) :], ZEROS)
        return y + bias.astype(y.dtype).reshape((1,) * len(rows) + self.outputs)


class Norm(nn.Module):
    """`scale` and `bias` of a layer norm."""

    model: Encoder

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        size = (self.model.model_dim,)
        scale = parameter(self, "scale", size, ("embed",), ONES)
        bias = parameter(self, "bias", size, ("embed",), ZEROS)
        return layer_norm(x, scale, bias, self.model.norm_epsilon)


class Embedding(nn.Module):
    """`embedding` [R, D]: a row for each token, kind of token, or position."""

    model: Encoder
    rows: int
    axis: str

    def setup(self) -> None:
        self.embedding = parameter(
            self, "embedding", (self.rows, self.model.model_dim), (self.axis, "embed"),
            nn.initializers.normal(DEVIATION),
        )  # fmt: skip

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Rows in the dtype of activations."""
        return jnp.take(self.embedding, ids, axis=0).astype(compute_dtype(self.model))
