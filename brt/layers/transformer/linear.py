"""Modules that own a matrix, an embedding or a norm."""

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

POSITION_OFFSET = 2  # BART's and RoBERTa's tables of positions have two rows that no token uses
DEVIATION = 0.02  # Deviation of initial embeddings and positions.


class Linear(nn.Module):
    """A matrix product with `kernel` [*inputs, *outputs] and `bias` [*outputs].

    Attributes:
      axes: logical names of the kernel's axes.
      deviation: standard deviation of the initial kernel; None for fan_in ** -0.5.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str | None, ...]
    has_bias: bool = True
    deviation: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Maps [..., *inputs] to [..., *outputs] in the dtype of x."""
        width = math.prod(self.inputs)  # A dimension of -1 fails for arrays without rows.
        init = nn.initializers.normal(self.deviation or width**-0.5)
        kernel = parameter(self, "kernel", (*self.inputs, *self.outputs), self.axes, init)
        y = dense(x, kernel, len(self.inputs))
        if not self.has_bias:
            return y
        axes = self.axes[len(self.inputs) :]
        return add_shared(y, parameter(self, "bias", self.outputs, axes, ZEROS))


class Norm(nn.Module):
    """A root-mean-square norm with `scale`, or a layer norm with `scale` and `bias`."""

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
    """`embedding`: one row for each token, kind of token, or bucket of distances.

    Attributes:
      axes: logical names of its two axes.
      deviation: standard deviation of the initial rows.
      dtype: dtype of the rows that are looked up.
    """

    shape: tuple[int, int]
    axes: tuple[str, str]
    deviation: float
    dtype: jnp.dtype = jnp.dtype("float32")

    def setup(self) -> None:
        init = nn.initializers.normal(self.deviation)
        self.embedding = parameter(self, "embedding", self.shape, self.axes, init)

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Returns the rows of the given ids."""
        if self.axes[1] != "embed":
            return jnp.take(self.embedding, ids, axis=0).astype(self.dtype)
        return lookup(self.embedding, ids, self.dtype, self.axes[0])
