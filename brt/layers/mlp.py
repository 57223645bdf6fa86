"""The MLP of a layer: the second half of a `TransformerBlock`."""

import flax.linen as nn
from jaxtyping import Array, Float

from brt.config import Model
from brt.distributed.rules import constrain
from brt.layers.basic import (
    ZEROS,
    dropout,
    norm_parameter,
    normed,
    parameter,
    product_kernel,
)
from brt.ops.activations import activation
from brt.ops.dense import dense
from brt.ops.reductions import add_shared

# These are the names of the axes of the MLP's kernels, by which kernels are sharded.
INTO_MLP, FROM_MLP = ("embed", "mlp"), ("mlp", "embed")


class MLP(nn.Module):
    """A norm, a projection to `Model.mlp_dim`, an activation, and a projection back.

    In gated MLPs, the activation is applied to a second projection `mlp_gate` of the input, and the
    first projection is multiplied by the result.
    """

    model: Model
    training: bool = False

    def setup(self) -> None:
        m = self.model
        wide = m.model_dim, m.mlp_dim
        self.mlp_norm = norm_parameter(self, m, "mlp_norm")
        self.mlp_in = product_kernel(self, m, "mlp_in", wide, INTO_MLP)
        if m.mlp.gated:
            self.mlp_gate = product_kernel(self, m, "mlp_gate", wide, INTO_MLP)
        if m.norm.outputs:
            self.mlp_output_norm = norm_parameter(self, m, "mlp_output_norm")
        self.mlp_out = product_kernel(self, m, "mlp_out", wide[::-1], FROM_MLP)
        if m.mlp.bias:
            self.mlp_in_bias = parameter(self, "mlp_in_bias", (m.mlp_dim,), ("mlp",), ZEROS)
            self.mlp_out_bias = parameter(self, "mlp_out_bias", (m.model_dim,), ("embed",), ZEROS)
            if m.mlp.gated:
                self.mlp_gate_bias = parameter(self, "mlp_gate_bias", (m.mlp_dim,), ("mlp",), ZEROS)

    def __call__(self, x: Float[Array, "B T D"], tokens: str | None) -> Float[Array, "B T D"]:
        """Returns x plus the MLP's output; `tokens` names the axis of tokens if it is sharded."""
        m = self.model
        h = normed(m, x, self.mlp_norm)
        y = self._products(h, tokens)
        if m.norm.outputs:
            y = normed(m, y, self.mlp_output_norm)
        return x + dropout(self, y, m.dropout)

    def _products(self, h: Float[Array, "B T D"], tokens: str | None) -> Float[Array, "B T D"]:
        m = self.model
        hidden = dense(h, self.mlp_in)
        if m.mlp.bias:
            hidden = add_shared(hidden, self.mlp_in_bias)
        if m.mlp.gated:
            gate = dense(h, self.mlp_gate)
            gate = add_shared(gate, self.mlp_gate_bias) if m.mlp.bias else gate
            hidden *= activation(gate, m.activation)
        else:
            hidden = activation(hidden, m.activation)
        hidden = constrain(hidden, "lanes", tokens, "mlp")
        out = dense(hidden, self.mlp_out)
        return add_shared(out, self.mlp_out_bias) if m.mlp.bias else out
