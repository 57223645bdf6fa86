"""The registry of kinds of layers.

A kind is a module and its `LayerKind`, registered by `register_kind`; nothing else distinguishes
kinds.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from brt.config import Model
from brt.config.kinds import KindSection, register_section
from brt.errors import ConfigError
from brt.layers.clustered import (
    CLUSTERED_AXES,
    ClusteredLayer,
    clustered_flops,
    new_clustered_state,
)
from brt.layers.recurrent import (
    RecurrentLayer,
    new_recurrent_state,
    recurrent_axes,
    recurrent_taps,
    state_update_flops,
)
from brt.layers.sections import Clustered, Recurrence
from brt.layers.state import LayerAux as LayerAux
from brt.layers.state import LayerState, new_window_state, window_axes
from brt.layers.taps import token_taps
from brt.layers.window import WindowLayer


class LayerKind(NamedTuple):
    """Everything that the rest of brt knows about a kind of layer.

    Its module has the fields `model`, `training` and `kernels`, and four methods, which return a
    `LayerOutput`. The first method reads a segment; the other three do the same for one block,
    token by token:

      __call__(x [B, T, D], state, document_start [B, N], feedback, summaries, model_state, taps)
      begin_block(None, state, document_start [B] or None, model_state, summaries=None)
      decode_step(x [B, 1, D], state, block, position, feedback, model_state, summaries=None)
      end_block(None, state, block, model_state, summaries)

    All arguments but x are keywords, and every kind gets all of them: a module names those that it
    uses and takes the others as `**_`. `begin_block` and `decode_step` return the open block in the
    place of the state. A layer may change its open block with every token, so that a recurrence
    over tokens keeps its state there.

      x: vectors of tokens.
      state: the state of the layer before the segment or the block.
      document_start: True where a block is the first of a document, where the layer forgets.
      feedback: the keys and values of the states that the highest recurrent layer shows to all
        layers (`StateKV`), or None.
      summaries: summaries [B, N, U, D] of the blocks by the layer below, or None.
      model_state: what the layer has learned without gradients; () for kinds without it. Only
        `__call__` returns the next one, in `LayerAux`.
      taps: accumulators of deferred weight gradients for a single block, or None.
      block: the open block.
      position: int32, the place of the token in its block.

    Attributes:
      new_state: (model, batch, dtype) -> the state of a layer that has read nothing, with the batch
        on axis 0.
      axes: (model) -> the names of the axes of the arrays of a state (`brt.distributed.rules`).
      parts: the fields of the state that make its "cache", its "state" or its "memory", each in
        one part: what can be ablated or exchanged by itself.
      flops: of a token, forward, of what the kind adds to a sliding-window layer.
      section: the kind's section of settings, which also places its layers; None only for
        sliding windows, which are all layers that no section places.
      recurs: whether it carries state vectors, `state.vectors` [B, S, D], and its open block
        shows them as `memory`: what probes look at, and what Model.feedback shows to others.
      loops: whether it goes block by block through a segment: its gradients then need all that
        it made on the way, which others compute again where that is quicker than to keep it.
      summaries: (model) -> the number of vectors in which a layer summarises a block for the
        layer above; None if the kind neither reads nor makes summaries.
      taps: (model, parameters of a run, blocks, lanes) -> accumulators of the weight gradients that
        are computed after a scan over blocks (`brt.ops.deferred`), with blocks on axis 0 and layers
        on axis 1; None if the kind defers none.
      new_model_state: (model) -> that of a layer of this kind at step 0; None: it has none.
      settle: (model, model_state) -> the next step's, of what a step's parts have made of it.
    """

    module: type[nn.Module]
    new_state: Callable[[Model, int, jnp.dtype], LayerState]
    axes: Callable[[Model], LayerState]
    parts: Mapping[str, tuple[str, ...]]
    flops: Callable[[Model], int]
    section: type[KindSection] | None = None
    recurs: bool = False
    loops: bool = False
    summaries: Callable[[Model], int] | None = None
    taps: Callable[[Model, Mapping[str, Any], int, int], Any] | None = None
    new_model_state: Callable[[Model], Any] | None = None
    settle: Callable[[Model, Any], Any] = lambda model, model_state: model_state


KINDS: dict[str, LayerKind] = {}


def register_kind(name: str, kind: LayerKind) -> None:
    """Makes a kind of layer known under a name.

    Raises:
      ConfigError: the name of the kind or of its section is taken.
    """
    if name in KINDS:
        raise ConfigError(f"there is a kind of layers named {name!r} already; take another name")
    if kind.section is not None:
        register_section(kind.section)
    KINDS[name] = kind


register_kind(
    "window",
    LayerKind(
        WindowLayer,
        new_window_state,
        window_axes,
        {"cache": ("keys", "values", "valid", "length")},
        lambda model: 0,
        taps=token_taps,
    ),
)
register_kind(
    "recurrent",
    LayerKind(
        RecurrentLayer,
        new_recurrent_state,
        recurrent_axes,
        {"cache": ("window",), "state": ("vectors", "valid")},
        state_update_flops,
        Recurrence,
        recurs=True,
        loops=True,
        taps=recurrent_taps,
    ),
)
register_kind(
    "clustered",
    LayerKind(
        ClusteredLayer,
        new_clustered_state,
        lambda model: CLUSTERED_AXES,
        {"cache": ("window",), "memory": ("keys", "values", "rest", "totals", "filled")},
        clustered_flops,
        Clustered,
        loops=True,
    ),
)


def of(name: str) -> LayerKind:
    """Returns the kind of that name.

    Raises:
      ConfigError: there is none.
    """
    if name not in KINDS:
        raise ConfigError(
            f"there is no kind of layers {name!r}, only {', '.join(map(repr, KINDS))}"
        )
    return KINDS[name]


def replace_parts(
    kind: LayerKind, state: LayerState, donor: LayerState, parts: Collection[str]
) -> LayerState:
    """Returns the state of a layer with the named parts taken from `donor`.

    Names that are not among the parts of the kind are ignored.
    """
    names = {field for part in parts for field in kind.parts.get(part, ())}
    return state._replace(**{name: getattr(donor, name) for name in names & {*state._fields}})
