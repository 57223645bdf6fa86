"""Layers in which some heads attend to tokens with similar queries, by clusters of queries (Routing
Transformer, arXiv 2003.05997).
"""

from brt.layers.kinds import LayerKind, register_kind
from brt.memories.routing.layer import (
    ROUTED_AXES,
    RoutingLayer,
    new_routed_state,
    new_routing,
    routing_flops,
    settled_routing,
)
from brt.memories.routing.section import Routing as Routing

register_kind(
    "routing",
    LayerKind(
        RoutingLayer,
        new_routed_state,
        lambda model: ROUTED_AXES,
        {"cache": ("window",), "memory": ("keys", "values", "filled")},
        routing_flops,
        Routing,
        new_model_state=new_routing,
        settle=settled_routing,
    ),
)
