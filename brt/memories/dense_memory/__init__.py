"""Layers whose tokens attend to all tokens of a memory of past tokens.

There are two kinds. In "dense_memory" layers, the baseline of MELODI (arXiv 2410.03156), a token
attends with one softmax to the memory and to its block. "gated_dense_memory" layers are
sliding-window layers that read the memory through a gate.
"""

from brt.layers.kinds import LayerKind, register_kind
from brt.memories.dense_memory.gated import GatedMemoryLayer, gated_flops, new_gated_state
from brt.memories.dense_memory.layer import (
    DENSE_AXES,
    DenseMemoryLayer,
    dense_memory_flops,
    new_dense_state,
)
from brt.memories.dense_memory.section import DenseMemory as DenseMemory
from brt.memories.memory_state import memory_axes

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
register_kind(
    "gated_dense_memory",
    LayerKind(
        GatedMemoryLayer,
        new_gated_state,
        memory_axes,
        {"cache": ("window",), "memory": ("keys", "values", "length")},
        gated_flops,
        DenseMemory,
    ),
)
