"""The kinds of layers. Adding one is a module and a line here: nothing else tells them apart."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from brt.config import Model
from brt.errors import ConfigError
from brt.layers.clustered import (
    CLUSTERED_AXES,
    ClusteredLayer,
    clustered_flops,
    new_clustered_state,
)
from brt.layers.compressive import (
    COMPRESSED_AXES,
    CompressiveLayer,
    compressive_flops,
    new_compressed_state,
)
from brt.layers.dense_memory import (
    DENSE_AXES,
    DenseMemoryLayer,
    dense_memory_flops,
    new_dense_state,
)
from brt.layers.memorizing import MEMORY_AXES, MemorizingLayer, memory_flops, new_memory_state
from brt.layers.recurrent import (
    RECURRENT_AXES,
    RecurrentLayer,
    new_recurrent_state,
    recurrent_taps,
    state_update_flops,
)
from brt.layers.routing import (
    ROUTED_AXES,
    RoutingLayer,
    new_routed_state,
    new_routing,
    routing_flops,
    settled_routing,
)
from brt.layers.state import WINDOW_AXES, LayerState, new_window_state
from brt.layers.state import LayerAux as LayerAux
from brt.layers.summary import (
    LONG_SUMMARY_AXES,
    SUMMARY_AXES,
    LongSummaryLayer,
    SummaryLayer,
    long_summary_flops,
    new_long_summary_state,
    new_summary_state,
    summary_flops,
)
from brt.layers.taps import token_taps
from brt.layers.window import WindowLayer


class LayerKind(NamedTuple):
    """All that the rest of brt knows of a kind of layer.

    Its module has the fields `model`, `training` and `kernels`, and four methods. The last three
    do the same as the first for one block, token by token:

      (x [B, T, D], state, document_start [B, N], feedback) -> (y, state)
      begin_block(None, state, document_start [B] or None, None) -> (None, block)
      decode_step(x [B, 1, D], (state, block), position, feedback) -> (y, block)
      end_block(None, (state, block), None, None) -> (None, state)

    Where a kind `sums_up`, x is a `Stream` with all that travels, and end_block takes and gives
    one, too; the summaries pass by the others.

    `feedback` is the `StateKV` that a layer shows to all others, or None. What a layer
    learns without gradients is its model state: the last argument of all four methods where the
    kind has one, and read only but for the first, which returns (y, state, LayerAux).

    Attributes:
      new_state: (model, batch, dtype) -> what has read nothing, with the batch on axis 0.
      axes: the names of the axes of its arrays (`brt.distributed.rules`).
      parts: the fields of the state that make its "cache", its "state" or its "memory", each in
        one part: what can be ablated or exchanged by itself.
      flops: of a token, forward, of what the kind adds to a sliding-window layer.
      settings: the fields of `Model` that are this kind's. One named <kind>_layers places
        it; a kind without such a field is placed by Model.layer_kinds.
      recurs: whether it carries state vectors, `state.vectors` [B, S, D], and its open block
        shows them as `memory`: what probes look at, and what Model.feedback shows to others.
      loops: whether it goes block by block through a segment: its gradients then need all that
        it made on the way, which others compute again where that is quicker than to keep it.
      sums_up: whether it reads and makes summaries of blocks.
      taps: (model, parameters of a run, blocks, lanes) -> a last argument of the first method,
        for weight gradients that are computed after a scan over blocks (`brt.ops.deferred`):
        with blocks on axis 0 and layers on axis 1; None: the kind takes none.
      new_model_state: (model) -> that of a layer of this kind at step 0; None: it has none.
      settle: (model, model_state) -> the next step's, of what a step's parts have made of it.
    """

    module: type[nn.Module]
    new_state: Callable[[Model, int, jnp.dtype], LayerState]
    axes: LayerState
    parts: Mapping[str, tuple[str, ...]]
    flops: Callable[[Model], int]
    settings: tuple[str, ...] = ()
    recurs: bool = False
    loops: bool = False
    sums_up: bool = False
    taps: Callable[[Model, Mapping[str, Any], int, int], Any] | None = None
    new_model_state: Callable[[Model], Any] | None = None
    settle: Callable[[Model, Any], Any] = lambda model, model_state: model_state


KINDS = {
    "window": LayerKind(
        WindowLayer,
        new_window_state,
        WINDOW_AXES,
        {"cache": ("keys", "values", "valid")},
        lambda model: 0,
        taps=token_taps,
    ),
    "recurrent": LayerKind(
        RecurrentLayer,
        new_recurrent_state,
        RECURRENT_AXES,
        {"cache": ("window",), "state": ("vectors", "valid")},
        state_update_flops,
        (
            "recurrent_layers", "states", "id_init", "gate", "gate_layout", "gate_bias",
            "gate_horizon", "gate_tanh",
        ),
        recurs=True,
        loops=True,
        taps=recurrent_taps,
    ),
    "memorizing": LayerKind(
        MemorizingLayer,
        new_memory_state,
        MEMORY_AXES,
        {"cache": ("window",), "memory": ("keys", "values", "length")},
        memory_flops,
        ("memorizing_layers", "memory_size", "memory_neighbors", "memory_search"),
    ),
    "dense_memory": LayerKind(
        DenseMemoryLayer,
        new_dense_state,
        DENSE_AXES,
        {"memory": ("keys", "values", "length")},
        dense_memory_flops,
        ("dense_memory_layers",),
    ),
    "clustered": LayerKind(
        ClusteredLayer,
        new_clustered_state,
        CLUSTERED_AXES,
        {"cache": ("window",), "memory": ("keys", "values", "rest", "totals", "filled")},
        clustered_flops,
        ("clustered_layers", "clusters", "cluster_top_k", "cluster_jensen"),
        loops=True,
    ),
    "compressive": LayerKind(
        CompressiveLayer,
        new_compressed_state,
        COMPRESSED_AXES,
        {"cache": ("window", "inputs"), "memory": ("vectors", "length")},
        compressive_flops,
        (
            "compressive_layers", "compressed_memory", "compression_rate", "compression",
            "compression_loss", "compression_weight",
        ),
    ),
    "routing": LayerKind(
        RoutingLayer,
        new_routed_state,
        ROUTED_AXES,
        {"cache": ("window",), "memory": ("keys", "values", "filled")},
        routing_flops,
        (
            "routing_layers", "routing_heads", "routing_clusters", "routing_keep",
            "routing_decay", "routing_commitment",
        ),
        new_model_state=new_routing,
        settle=settled_routing,
    ),
    "summary": LayerKind(
        SummaryLayer,
        new_summary_state,
        SUMMARY_AXES,
        {"state": ("vectors", "valid")},
        summary_flops,
        ("summary_layers", "summaries", "short_memory"),
        loops=True,
        sums_up=True,
    ),
    "long_summary": LayerKind(
        LongSummaryLayer,
        new_long_summary_state,
        LONG_SUMMARY_AXES,
        {"state": ("short",), "memory": ("vectors", "length")},
        long_summary_flops,
        ("long_summary_layers", "long_memory", "long_increment"),
        loops=True,
        sums_up=True,
    ),
}  # fmt: skip


def of(name: str) -> LayerKind:
    """The kind of that name.

    Raises:
      ConfigError: there is none.
    """
    if name not in KINDS:
        raise ConfigError(
            f"Model.layer_kinds names {name!r}, but the kinds of layers are "
            + ", ".join(map(repr, KINDS))
        )
    return KINDS[name]


def replace_parts(
    kind: LayerKind, state: LayerState, donor: LayerState, parts: Collection[str]
) -> LayerState:
    """A layer's `state` with some of its parts taken from `donor`; those of no such name stay."""
    fields = [field for part in parts for field in kind.parts.get(part, ())]
    return state._replace(**{field: getattr(donor, field) for field in fields})
