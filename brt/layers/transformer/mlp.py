"""The MLP of encoder layers and decoder layers.

In shapes, *B stands for any leading axes, and D is the width of the model.
"""

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from brt.layers.basic import dropout
from brt.layers.transformer.block import Block
from brt.ops.activations import relu


class Mlp(nn.Module):
    """An MLP with one hidden layer: the projection `wi`, an activation, and the projection `wo`.

    A gated MLP has two projections `wi_0` and `wi_1`, and multiplies the activation of the first
    by the second.

    Attributes:
      block: sizes and settings of the layer.
      training: True applies dropout.
    """

    block: Block
    training: bool = False

    def setup(self) -> None:
        """Creates the two projections, or three for a gated activation."""
        b = self.block
        inner, outer, axes = (b.mlp_dim,), (b.model_dim,), ("embed", "mlp")
        if b.activation == "gated_gelu":
            self.wi_0, self.wi_1 = b.linear(outer, inner, axes), b.linear(outer, inner, axes)
        else:
            self.wi = b.linear(outer, inner, axes)
        self.wo = b.linear(inner, outer, ("mlp", "embed"))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Returns the output of the MLP for the vectors x, in the dtype of x."""
        b = self.block
        if b.activation == "gated_gelu":
            hidden = jax.nn.gelu(self.wi_0(x), approximate=True) * self.wi_1(x)
        else:
            hidden = activated(b.activation, self.wi(x))
        return self.wo(dropout(self, hidden, b.activation_dropout))


def activated(kind: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns relu(x) if `kind` is "relu", and otherwise the exact (not approximated) gelu(x)."""
    return relu(x) if kind == "relu" else jax.nn.gelu(x, approximate=False)
