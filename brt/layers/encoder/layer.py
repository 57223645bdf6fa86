"""A layer of the encoder."""

import flax.linen as nn
import jax
from jaxtyping import Array, Bool, Float

from brt.config import Attention, Encoder, Kernels
from brt.layers.basic import dropout
from brt.layers.encoder.attention import SelfAttention
from brt.layers.encoder.linear import Linear, Norm
from brt.ops.activations import relu


class Mlp(nn.Module):
    """`wi`, an activation, `wo`."""

    model: Encoder

    def setup(self) -> None:
        m = self.model
        self.wi = Linear((m.model_dim,), (m.mlp_dim,), ("embed", "mlp"))
        self.wo = Linear((m.mlp_dim,), (m.model_dim,), ("mlp", "embed"))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.wo(activation(self.model, self.wi(x)))


class EncoderLayer(nn.Module):
    """Self-attention and an MLP, each with its residual and its norm, before or after."""

    model: Encoder
    attention: Attention
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.self_attn = SelfAttention(self.model, self.attention, self.training, self.kernels)
        self.self_attn_norm = Norm(self.model)
        self.mlp = Mlp(self.model)
        self.mlp_norm = Norm(self.model)

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"], key: jax.Array
    ) -> Float[Array, "B T D"]:
        y = self.self_attn(self._before(self.self_attn_norm, x), valid, key)
        x = self._after(self.self_attn_norm, x, y)
        return self._after(self.mlp_norm, x, self.mlp(self._before(self.mlp_norm, x)))

    def _before(self, norm: Norm, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return norm(x) if self.model.norm_first else x

    def _after(
        self, norm: Norm, x: Float[Array, "B T D"], y: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        total = x + dropout(self, y, self.model.dropout)
        return total if self.model.norm_first else norm(total)


def activation(model: Encoder, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The one that the model names; gelu is the exact one."""
    return relu(x) if model.activation == "relu" else jax.nn.gelu(x, approximate=False)
