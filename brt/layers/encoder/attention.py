"""Self-attention of every kind that `Attention.kind` names."""

import flax.linen as nn
import jax
from jaxtyping import Array, Bool, Float

from brt.config import Attention, Encoder, Kernels
from brt.layers.encoder.linear import Linear
from brt.ops.attention import attend
from brt.ops.dropout import Dropout


class SelfAttention(nn.Module):
    """`q`, `k`, `v` into heads and `o` out of them; no `k` where queries and keys share one.

    The parameters are the same for every kind, so that weights fit them all.
    """

    model: Encoder
    attention: Attention
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        heads, into = (m.heads, m.head_dim), ("embed", "heads", "head")
        self.q = Linear((m.model_dim,), heads, into)
        if not m.shared_queries_keys:
            self.k = Linear((m.model_dim,), heads, into)
        self.v = Linear((m.model_dim,), heads, into)
        self.o = Linear(heads, (m.model_dim,), ("heads", "head", "embed"))

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"], key: jax.Array
    ) -> Float[Array, "B T D"]:
        """Every valid token sees the others; `key` is of what the kind draws at random."""
        q = self.q(x)
        k = q if self.model.shared_queries_keys else self.k(x)
        y = attend(
            q, k, self.v(x), valid, self.attention, key, self._dropout(), kernels=self.kernels
        )
        return self.o(y)

    def _dropout(self) -> Dropout | None:
        rate = attention_dropout(self.model)
        if not self.training or rate == 0:
            return None
        return Dropout(self.make_rng("dropout"), rate)


def attention_dropout(model: Encoder) -> float:
    """The rate of attention weights."""
    return model.dropout if model.attention_dropout == -1 else model.attention_dropout
