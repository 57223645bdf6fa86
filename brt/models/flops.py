"""Arithmetic of a forward pass, counted from the sizes: products only, each as 2 m n k.

A token attends to exactly `window` keys, whatever a tile computes besides; the paper's step
times include what its code computed in vain (Block-Recurrent Transformers, Table 1).
"""

from brt.config import Model


def forward_flops_per_token(model: Model) -> int:
    """Of a model whose vocabulary size is set; a training step takes about three times that."""
    m, width = model, model.heads * model.head_dim
    projection = 2 * m.model_dim * width
    attention = 4 * width  # per key: queries with keys, weights with values
    layer = 4 * projection + 4 * m.model_dim * m.mlp_dim + attention * m.window
    reading = 2 * projection + attention * m.states  # queries, wider output, keys of the states
    flops = m.layers * layer + 2 * m.model_dim * m.vocab_size
    for kind in m.layer_types:
        if kind == "recurrent":
            flops += reading + _state_update(m) * m.states // m.window
        elif m.feedback:
            flops += reading
        if kind == "memorizing":
            flops += 2 * width * m.memory_size + attention * m.memory_neighbors
        if kind == "clustered":
            flops += _clustered(m)
    return flops


def _clustered(m: Model) -> int:
    """Beside the window, per token: its centroid, what left the window, what the centroid has.

    Every centroid looks at a key once, and at what it keeps once a block.
    """
    attention = 4 * m.heads * m.head_dim
    left = (m.window + 1) // 2 if m.attend_to_self else (m.window - 1) // 2  # on average
    reading = attention // 2 * m.clusters + attention * (left + m.cluster_top_k)
    taking_in = attention * m.clusters * (m.window + m.cluster_top_k) // m.window
    return reading + taking_in


def _state_update(m: Model) -> int:
    """Of one state vector: keys, values, two queries, both attentions, and the gated layers."""
    width = m.heads * m.head_dim
    flops = 4 * 2 * m.model_dim * width + 4 * width * (m.states + 2 * m.window)
    gates = {"fixed": 0, "gru": 1, "lstm": 2}[m.gate]
    into_mlp = m.model_dim
    if m.gate_layout == "single":
        into_mlp = 2 * width
    else:
        flops += (1 + gates) * 2 * 2 * width * m.model_dim
    if m.gate_layout != "skip":
        flops += 2 * into_mlp * m.mlp_dim + (1 + gates) * 2 * m.mlp_dim * m.model_dim
    return flops
