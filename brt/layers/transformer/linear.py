"""Modules that own a matrix, an embedding or a norm. In shapes, *B stands for any leading axes."""

import math
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.layers.basic import ONES, ZEROS, parameter
from brt.ops.dense import dense
from brt.ops.lookup import lookup
from brt.ops.normalization import layer_norm, rms_norm
from brt.ops.reductions import add_shared

# In BART's and RoBERTa's tables of positions, the first two rows belong to no position of a token.
POSITION_OFFSET = 2
# This is the standard deviation of initial embeddings and positions.
DEVIATION = 0.02


class Linear(nn.Module):
    """A linear layer with the parameters `kernel` [*inputs, *outputs] and `bias` [*outputs]. The
    initial kernel has the standard deviation `deviation`; None stands for fan_in ** -0.5.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str | None, ...]
    has_bias: bool = True
    deviation: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        width = math.prod(self.inputs)
        init = nn.initializers.normal(self.deviation or width**-0.5)
        kernel = parameter(self, "kernel", (*self.inputs, *self.outputs), self.axes, init)
        y = dense(x, kernel, len(self.inputs))
        if not self.has_bias:
            return y
        axes = self.axes[len(self.inputs) :]
        return add_shared(y, parameter(self, "bias", self.outputs, axes, ZEROS))


class Norm(nn.Module):
    """A root-mean-square norm with the parameter `scale`, or a layer norm with `scale` and `bias`.
    `epsilon` is added to the mean square or to the variance.
    """

    kind: Literal["rms", "layer"]
    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        size = x.shape[-1:]
        scale = parameter(self, "scale", size, ("embed",), ONES)
        if self.kind == "rms":
            return rms_norm(x, scale, self.epsilon)
        return layer_norm(x, scale, parameter(self, "bias", size, ("embed",), ZEROS), self.epsilon)


class Embedding(nn.Module):
    """A table of rows, one for each token, type or bucket; rows are looked up in `dtype`."""

    shape: tuple[int, int]
    axes: tuple[str, str]
    deviation: float
    dtype: jnp.dtype = jnp.dtype("float32")

    def setup(self) -> None:
        init = nn.initializers.normal(self.deviation)
        self.embedding = parameter(self, "embedding", self.shape, self.axes, init)

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        if self.axes[1] != "embed":
            return jnp.take(self.embedding, ids, axis=0).astype(self.dtype)
        return lookup(self.embedding, ids, self.dtype, self.axes[0])
