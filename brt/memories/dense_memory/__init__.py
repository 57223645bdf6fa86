"""Layers that attend, with one softmax, to their block and to all tokens of a memory (baseline of
MELODI, arXiv 2410.03156).
"""

from brt.layers.kinds import LayerKind, register_kind
from brt.memories.dense_memory.layer import (
    DENSE_AXES,
    DenseMemoryLayer,
    dense_memory_flops,
    new_dense_state,
)
from brt.memories.dense_memory.section import DenseMemory as DenseMemory

register_kind(
    "dense_memory",
    LayerKind(
        DenseMemoryLayer,
        new_dense_state,
        lambda model: DENSE_AXES,
        {"memory": ("keys", "values", "length")},
        dense_memory_flops,
        DenseMemory,
    ),
)
