"""Layers that remember older blocks in compressed form: a few tokens of an older block become one
vector (Compressive Transformers, arXiv 1911.05507).
"""

from brt.layers.kinds import LayerKind, register_kind
from brt.memories.compressive.layer import (
    COMPRESSED_AXES,
    CompressiveLayer,
    compressive_flops,
    new_compressed_state,
)
from brt.memories.compressive.section import Compressive as Compressive

register_kind(
    "compressive",
    LayerKind(
        CompressiveLayer,
        new_compressed_state,
        lambda model: COMPRESSED_AXES,
        {"cache": ("window", "inputs"), "memory": ("vectors", "length")},
        compressive_flops,
        Compressive,
    ),
)
