"""The feed-forward layer: T5's, its gated successor, BART's."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from brt.config import Seq2Seq
from brt.layers.basic import dropout
from brt.layers.seq2seq.linear import Linear
from brt.ops.activations import relu


class Mlp(nn.Module):
    """`wi` (gated: `wi_0`, `wi_1`), an activation, `wo`."""

    model: Seq2Seq
    training: bool = False

    def setup(self) -> None:
        m = self.model
        names = ("wi_0", "wi_1") if m.activation == "gated_gelu" else ("wi",)
        for name in names:
            widen = Linear(
                m, (m.model_dim,), (m.mlp_dim,), ("embed", "mlp"), m.model_dim**-0.5, name=name
            )
            setattr(self, name, widen)
        self.wo = Linear(m, (m.mlp_dim,), (m.model_dim,), ("mlp", "embed"), m.mlp_dim**-0.5)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        m = self.model
        if m.activation == "gated_gelu":
            hidden = jax.nn.gelu(self.wi_0(x), approximate=True) * self.wi_1(x)
        elif m.activation == "gelu":
            hidden = jax.nn.gelu(self.wi(x), approximate=False)
        else:
            hidden = relu(self.wi(x))
        return self.wo(dropout(self, hidden, activation_dropout(m)))


def activation_dropout(model: Seq2Seq) -> float:
    """The rate inside the MLP."""
    return model.dropout if model.activation_dropout == -1 else model.activation_dropout


def attention_dropout(model: Seq2Seq) -> float:
    """The rate of attention weights."""
    return model.dropout if model.attention_dropout == -1 else model.attention_dropout
