"""The MLP of encoder layers and decoder layers."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from brt.layers.basic import dropout
from brt.layers.transformer.block import Block
from brt.ops.activations import relu


class Mlp(nn.Module):
    """An MLP with one hidden layer: the projection `wi`, an activation, and the projection `wo`. A
    gated MLP has two projections `wi_0` and `wi_1`, and multiplies the activation of the first by
    the second.
    """

    block: Block
    training: bool = False

    def setup(self) -> None:
        b = self.block
        inner, outer, axes = (b.mlp_dim,), (b.model_dim,), ("embed", "mlp")
        if b.activation == "gated_gelu":
            self.wi_0, self.wi_1 = b.linear(outer, inner, axes), b.linear(outer, inner, axes)
        else:
            self.wi = b.linear(outer, inner, axes)
        self.wo = b.linear(inner, outer, ("mlp", "embed"))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        b = self.block
        if b.activation == "gated_gelu":
            hidden = jax.nn.gelu(self.wi_0(x), approximate=True) * self.wi_1(x)
        else:
            hidden = activated(b.activation, self.wi(x))
        return self.wo(dropout(self, hidden, b.activation_dropout))


def activated(kind: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    return relu(x) if kind == "relu" else jax.nn.gelu(x, approximate=False)
