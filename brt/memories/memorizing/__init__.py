"""Layers that also attend to a few tokens of a long memory, which a search selects for each query
(Memorizing Transformers, arXiv 2203.08913).
"""

from brt.layers.kinds import LayerKind, register_kind
from brt.memories.memorizing.layer import MemorizingLayer, memory_flops, new_memory_state
from brt.memories.memorizing.section import Memorizing as Memorizing
from brt.memories.memory_state import memory_axes

register_kind(
    "memorizing",
    LayerKind(
        MemorizingLayer,
        new_memory_state,
        memory_axes,
        {"cache": ("window",), "memory": ("keys", "values", "length")},
        memory_flops,
        Memorizing,
    ),
)
