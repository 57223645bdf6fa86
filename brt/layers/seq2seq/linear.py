"""What owns a matrix, an embedding or a norm, named and initialised as T5 and BART do."""

import math

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Seq2Seq
from brt.layers.basic import ONES, compute_dtype, parameter
from brt.ops.dense import dense
from brt.ops.normalization import layer_norm, rms_norm
from brt.ops.reductions import add_shared

BART_DEVIATION = 0.02
ZEROS = nn.initializers.zeros


class Linear(nn.Module):
    """`kernel` [*inputs, *outputs] and, in BART, `bias` [*outputs].

    Attributes:
      axes: logical names of the kernel's axes.
      deviation: of the initial kernel in T5.
    """

    model: Seq2Seq
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str, ...]
    deviation: float

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """[..., *inputs] -> [..., *outputs] in x's dtype."""
        bart = self.model.family == "bart"
        init = nn.initializers.normal(BART_DEVIATION if bart else self.deviation)
        kernel = parameter(self, "kernel", (*self.inputs, *self.outputs), self.axes, init)
        rows = x.shape[: x.ndim - len(self.inputs)]
        width = math.prod(self.inputs)  # spelt out: there may be no rows
        flat = kernel.reshape(width, math.prod(self.outputs))
        y = dense(x.reshape(*rows, width), flat).reshape(*rows, *self.outputs)
        if not bart:
            return y
        axes = self.axes[len(self.inputs) :]
        bias = parameter(self, "bias", self.outputs, axes, ZEROS)
        return add_shared(y, bias)


class Norm(nn.Module):
    """T5: `scale` by root mean square; BART: `scale` and `bias` of a layer norm."""

    model: Seq2Seq

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        size = (self.model.model_dim,)
        scale = parameter(self, "scale", size, ("embed",), ONES)
        if self.model.family == "t5":
            return rms_norm(x, scale, self.model.norm_epsilon)
        bias = parameter(self, "bias", size, ("embed",), ZEROS)
        return layer_norm(x, scale, bias, self.model.norm_epsilon)


class Embedding(nn.Module):
    """`embedding` [V, D]: a row for each token."""

    model: Seq2Seq

    def setup(self) -> None:
        m = self.model
        deviation = BART_DEVIATION if m.family == "bart" else 1.0
        self.embedding = parameter(
            self, "embedding", (m.vocab_size, m.model_dim), ("vocab", "embed"),
            nn.initializers.normal(deviation),
        )  # fmt: skip

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """The tokens' rows in the dtype of activations."""
        return jnp.take(self.embedding, tokens, axis=0).astype(compute_dtype(self.model))


class RelativeBias(nn.Module):
    """`embedding` [R, H]: T5's bias of each bucket of distances."""

    model: Seq2Seq

    @nn.compact
    def __call__(self) -> Float[Array, "R H"]:
        m = self.model
        return parameter(
            self, "embedding", (m.relative_buckets, m.heads), ("buckets", "heads"),
            nn.initializers.normal(m.model_dim**-0.5),
        )  # fmt: skip
