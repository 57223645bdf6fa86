"""Layers whose memory is a matrix for each head, which every token changes by a gated delta rule
(Gated DeltaNet, Yang, Kautz, Hatamizadeh 2024).

The kind "gated_delta_net" has this memory in place of attention, and the kind
"window_gated_delta_net" has it in addition to attention to a window.
"""

from brt.layers.kinds import LayerKind, register_kind
from brt.memories.gated_delta_net.layer import (
    GatedDeltaNetLayer,
    WindowGatedDeltaNetLayer,
    gated_delta_net_flops,
    new_window_delta_state,
    window_delta_axes,
    window_delta_flops,
)
from brt.memories.gated_delta_net.memory import delta_axes, new_delta_state
from brt.memories.gated_delta_net.section import GatedDeltaNet as GatedDeltaNet

register_kind(
    "gated_delta_net",
    LayerKind(
        GatedDeltaNetLayer,
        new_delta_state,
        delta_axes,
        {"state": ("matrices", "inputs")},
        gated_delta_net_flops,
        GatedDeltaNet,
        loops=True,
    ),
)
register_kind(
    "window_gated_delta_net",
    LayerKind(
        WindowGatedDeltaNetLayer,
        new_window_delta_state,
        window_delta_axes,
        {"cache": ("window",), "state": ("matrices", "inputs")},
        window_delta_flops,
        GatedDeltaNet,
        loops=True,
    ),
)
