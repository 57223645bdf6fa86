"""Layers with a gated linear recurrence over tokens, RG-LRU (Griffin, De et al. 2024)."""

from brt.layers.kinds import LayerKind, register_kind
from brt.memories.rg_lru.layer import RGLRULayer, new_state, rg_lru_flops, state_axes
from brt.memories.rg_lru.section import RGLRU as RGLRU

register_kind(
    "rg_lru",
    LayerKind(
        RGLRULayer,
        new_state,
        state_axes,
        {"state": ("hidden", "inputs")},
        rg_lru_flops,
        RGLRU,
    ),
)
