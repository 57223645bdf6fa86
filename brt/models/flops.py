"""Arithmetic of a forward pass, counted from the sizes: products only, each as 2 m n k.

A token attends to exactly `window` keys, whatever a tile computes besides; the paper's step
times include what its code computed in vain (Block-Recurrent Transformers, Table 1).
"""

from brt.config import Model
from brt.layers import kinds
from brt.layers.sections import Recurrence


def forward_flops_per_token(model: Model) -> int:
    """Of a model whose vocabulary size is set; a training step takes about three times that."""
    m, width = model, model.heads * model.head_dim
    projection = 2 * m.model_dim * width
    attention = 4 * width  # per key: queries with keys, weights with values
    layer = 4 * projection + 4 * m.model_dim * m.mlp_dim + attention * m.window
    reading = (
        2 * projection + attention * m.of(Recurrence).states
    )  # queries, wider output, keys of the states
    flops = m.layers * layer + 2 * m.model_dim * m.vocab_size
    for kind in map(kinds.of, m.layer_types):
        flops += kind.flops(m) + (reading if kind.recurs or m.feedback else 0)
    return flops
