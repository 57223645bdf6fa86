"""FLOPs of a decoder's forward pass, counted from its sizes: matrix products only, 2 m n k for
each.

A token counts as attending to exactly `window` keys, even if a tile computes more. The step times
of the paper include products that its code computed in vain (Block-Recurrent Transformers, Table
1).
"""

from brt.config import Model
from brt.layers import kinds
from brt.layers.sections import Recurrence


def forward_flops_per_token(model: Model) -> int:
    """Returns the FLOPs per token of a model whose vocabulary size is set; a train step takes about
    three times as many.
    """
    m, width = model, model.heads * model.head_dim
    projection = 2 * m.model_dim * width
    attention = 4 * width  # Per key: products with keys and with values.
    key_projection = 2 * m.model_dim * m.key_heads * m.head_dim
    mlp = (6 if m.gated_mlp else 4) * m.model_dim * m.mlp_dim
    layer = 2 * projection + 2 * key_projection + mlp
    reading = (
        2 * projection + attention * m.of(Recurrence).states
    )  # Queries, a wider output, attention to the states.
    flops = (
        m.layers * layer
        + attention * sum(m.windows)
        + attention * m.sinks * m.layers
        + 2 * m.model_dim * m.vocab_size
    )
    for kind in map(kinds.of, m.layer_types):
        flops += kind.flops(m) + (reading if kind.recurs or m.feedback else 0)
    return flops
