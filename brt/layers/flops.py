"""FLOPs of a sliding-window layer, from which the FLOPs of other kinds of layers are counted."""

from brt.config import Model
from brt.layers.sections import Recurrence


def window_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer with its MLP.

    Only matrix products are counted, 2 m n k for the product of an m x k and a k x n matrix. A
    token counts as attending to exactly `Model.window` keys and to all sinks, even if an
    implementation computes the logits of more keys.
    """
    m, width = model, model.heads * model.head_dim
    projections = 4 * m.model_dim * (width + m.key_heads * m.head_dim)
    # The factor 4 counts two products, with keys and with values, of 2 FLOPs per multiplication.
    attention = 4 * width * (m.window + m.sliding.sinks)
    state_attention = state_attention_flops(model) if m.feedback else 0
    return projections + attention + mlp_flops(model) + state_attention


def mlp_flops(model: Model) -> int:
    return (6 if model.mlp.gated else 4) * model.model_dim * model.mlp_dim


def state_attention_flops(model: Model) -> int:
    """Returns the FLOPs per token of the attention of tokens to recurrent states: two projections,
    of queries and of the result, and the products with the states' keys and values.
    """
    width = model.heads * model.head_dim
    return 4 * model.model_dim * width + 4 * width * model.of(Recurrence).states
