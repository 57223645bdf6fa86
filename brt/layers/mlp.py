"""The MLP of a layer: the second half of a `TransformerBlock`."""

import flax.linen as nn
from jaxtyping import Array, Float

from brt.config import Model
from brt.distributed.rules import constrain
from brt.layers.basic import ONES, ZEROS, dropout, parameter
from brt.layers.taps import NO_TAPS, TokenTaps
from brt.ops import deferred
from brt.ops.activations import relu
from brt.ops.normalization import rms_norm
from brt.ops.reductions import add_shared


class MLP(nn.Module):
    """A norm, a projection to `Model.mlp_dim`, a ReLU, and a projection back."""

    model: Model
    training: bool = False

    def setup(self) -> None:
        m = self.model
        self.mlp_norm = parameter(self, "mlp_norm", (m.model_dim,), ("embed",), ONES)
        self.mlp_in = parameter(self, "mlp_in", (m.model_dim, m.mlp_dim), ("embed", "mlp"))
        self.mlp_out = parameter(self, "mlp_out", (m.mlp_dim, m.model_dim), ("mlp", "embed"))
        if m.mlp_bias:
            self.mlp_in_bias = parameter(self, "mlp_in_bias", (m.mlp_dim,), ("mlp",), ZEROS)
            self.mlp_out_bias = parameter(self, "mlp_out_bias", (m.model_dim,), ("embed",), ZEROS)

    def __call__(
        self, x: Float[Array, "B T D"], tokens: str | None, taps: TokenTaps = NO_TAPS
    ) -> Float[Array, "B T D"]:
        """Returns x plus the output of the MLP.

        Args:
          x: the residual stream.
          tokens: the name of the axis of tokens, if it is sharded.
          taps: accumulators of deferred weight gradients.
        """
        y = self._products(rms_norm(x, self.mlp_norm), tokens, taps)
        return x + dropout(self, y, self.model.dropout)

    def _products(
        self, h: Float[Array, "B T D"], tokens: str | None, taps: TokenTaps
    ) -> Float[Array, "B T D"]:
        biased, first, last = self.model.mlp_bias, taps.mlp_in, taps.mlp_out
        if first and last and not biased:
            return deferred.relu_mlp(h, (self.mlp_in, self.mlp_out), (first, last))
        hidden = deferred.dot(h, self.mlp_in, first)
        if biased:
            hidden = add_shared(hidden, self.mlp_in_bias)
        hidden = relu(hidden, keeps=last is not None)
        hidden = constrain(hidden, "lanes", tokens, "mlp")
        out = deferred.dot(hidden, self.mlp_out, last)
        return add_shared(out, self.mlp_out_bias) if biased else out
