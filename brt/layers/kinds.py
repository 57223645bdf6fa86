"""The registry of kinds of layers.

A kind of layer consists of a Flax module and a `LayerKind` that describes the module. The function
`register_kind` adds a kind to the registry. The rest of brt handles all kinds in the same way.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from brt.config import SECTIONS, Model
from brt.config.kinds import KindSection, register_section
from brt.config.model import PARTS
from brt.distributed.rules import check_names
from brt.errors import ConfigError
from brt.layers.clustered import (
    CLUSTERED_AXES,
    ClusteredLayer,
    clustered_flops,
    new_clustered_state,
)
from brt.layers.flops import window_flops
from brt.layers.recurrent import (
    RecurrentLayer,
    new_recurrent_state,
    recurrent_axes,
    recurrent_flops,
)
from brt.layers.registration import check_kind
from brt.layers.sections import Clustered, Recurrence
from brt.layers.state import LayerAux as LayerAux
from brt.layers.state import LayerState, new_window_state, window_axes
from brt.layers.window import WindowLayer


class LayerKind(NamedTuple):
    """Everything that the rest of brt knows about a kind of layer.

    The module of a kind has the fields `model`, `training` and `kernels`, and four methods, each of
    which returns a `LayerOutput`. The first method reads a segment of N blocks. The other three
    methods together read one block token by token, with the same result:

      __call__(x [B, T, D], state, document_start [B, N], feedback, summaries, model_state)
      begin_block(None, state, document_start, model_state, summaries)
      decode_step(x [B, 1, D], state, block, position, feedback, model_state, summaries)
      end_block(None, state, block, model_state, summaries)

    All arguments but x are passed by keyword, and every kind gets all of them. A module declares
    the keywords that it uses and takes the others as `**_`. The output x has the shape and the
    dtype of the input x, and the state keeps the shapes and dtypes of `new_state`.

    An open block has the data of a block whose tokens are read one by one. `begin_block` and
    `decode_step` return the open block in the field `state` of their output. A layer may change its
    open block with every token, so a recurrence over tokens keeps its state in the open block.
    Where the token changes only some entries of an array, `decode_step` may return these alone
    (`brt.layers.entries.NewEntries`), so that the array is not copied. A module whose open block
    contains a `brt.layers.state.OpenBlock` may have a fifth method, `prepare_block(None, block,
    position)`, which is called before several tokens are read one by one. It sets the field `ready`
    of the `OpenBlock`, which brt removes after these tokens.

      state: the state of the layer before the segment or the block.
      document_start: True where a block is the first block of a document. The layer must not use
        anything that it read before such a block. For `begin_block`, it is None, because a
        generated document starts with a new state; only a kind that recurs gets [B] there, in
        models with `Model.feedback`.
      feedback: the keys and values of the highest recurrent layer's states (`StateKV`), to which
        all layers attend if `Model.feedback` is set; otherwise None.
      summaries: the summaries [B, N, U, D] that the layer below computed, U vectors for each block,
        or None. `begin_block` and `decode_step` always get None.
      model_state: statistics that the layer learns without gradients, such as centroids; () for
        kinds without such statistics. Only `__call__` returns the next model state, in `LayerAux`.
      position: int32, the place of the token in its block.
    """

    module: type[nn.Module]
    # Returns, for (model, batch, dtype), the state of a layer that has read nothing.
    new_state: Callable[[Model, int, jnp.dtype], LayerState]
    # Returns a state whose fields are the names of the arrays' axes (`brt.distributed.rules`).
    axes: Callable[[Model], LayerState]
    # The names of the state's fields that belong to the part "cache", "state" or "memory", each of
    # which evaluation can reset or exchange. None stands for all fields. A field belongs to at most
    # one part.
    parts: Mapping[str, tuple[str, ...] | None]
    # Returns the FLOPs per token of the forward pass, of which a multiplication and an addition are
    # two. Kinds may add theirs to those of `window_flops` or `mlp_flops` (`brt.layers.flops`).
    flops: Callable[[Model], int]
    # The section of settings, which also lists the indices of the kind's layers. None for sliding
    # windows: all layers that no section lists are sliding-window layers.
    section: type[KindSection] | None = None
    # True if the layer carries S state vectors, in the field `vectors` [B, S, D] of the state, and
    # if its open block has their keys and values in the field `memory`.
    recurs: bool = False
    # True if the layer scans over the blocks or the tokens of a segment. The results of such a
    # layer are stored for its backward pass. Results of other layers are recomputed in the backward
    # pass on backends where this is faster.
    loops: bool = False
    # True if `decode_step` also accepts several tokens of a block, [B, T, D], the first of which
    # has the place `position`. Prompts are then read T tokens at a time.
    reads_chunks: bool = False
    # Returns the number of vectors in which a layer summarises a block for the layer above; None if
    # layers of the kind neither read nor compute summaries.
    summaries: Callable[[Model], int] | None = None
    # Returns the model state of a layer at step 0; None if the kind has no model state.
    new_model_state: Callable[[Model], Any] | None = None
    # Returns the model state for the next train step, from the model state that the calls of this
    # step have returned.
    settle: Callable[[Model, Any], Any] = lambda model, model_state: model_state


KINDS: dict[str, LayerKind] = {}


def register_kind(name: str, kind: LayerKind) -> None:
    """Adds a kind of layer, and its section of settings, to the registry under a name.

    Raises:
      ConfigError: the name is taken; the kind lacks something that every kind needs
        (`brt.layers.registration`); or its section places layers of other kinds.
    """
    if name in KINDS:
        raise ConfigError(f"there is a kind of layers named {name!r} already; take another name")
    check_kind(name, kind)
    if (section := kind.section) is not None:
        if section.__name__ in (*SECTIONS, *PARTS, "Sweep"):
            raise ConfigError(
                f"{section.__name__!r} cannot be the section of the kind {name!r}, because brt has "
                "a section of this name; rename the class"
            )
        if name not in (placed := section().layers_by_kind()):
            raise ConfigError(
                f"the section {section.__name__} places layers of the kind "
                f"{' and '.join(map(repr, placed))}, not of {name!r}; register one of these names"
            )
        register_section(section)
    KINDS[name] = kind


register_kind(
    "window",
    LayerKind(
        WindowLayer,
        new_window_state,
        window_axes,
        {"cache": None},
        window_flops,
        reads_chunks=True,
    ),
)
register_kind(
    "recurrent",
    LayerKind(
        RecurrentLayer,
        new_recurrent_state,
        recurrent_axes,
        {"cache": ("window",), "state": ("vectors", "valid")},
        recurrent_flops,
        Recurrence,
        recurs=True,
        loops=True,
        reads_chunks=True,
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
    if name not in KINDS:
        raise ConfigError(
            f"there is no kind of layers {name!r}, only {', '.join(map(repr, KINDS))}"
        )
    return KINDS[name]


def fields_of(kind: LayerKind, part: str, state: LayerState) -> tuple[str, ...]:
    """Returns the names of the state's fields that belong to a part ("cache", "state" or "memory");
    () if layers of this kind do not have this part.
    """
    fields = kind.parts.get(part, ())
    return state._fields if fields is None else fields


def check_state(name: str, model: Model) -> None:
    """Raises ConfigError if a kind's `parts` or `axes` do not match the state of its layers."""
    kind = of(name)
    state = jax.eval_shape(lambda: kind.new_state(model, 1, jnp.dtype("float32")))
    for part in kind.parts:
        for field in fields_of(kind, part, state):
            if field not in state._fields:
                raise ConfigError(
                    f"the kind {name!r} counts a field {field!r} to the part {part!r}, but its "
                    f"state has the fields {', '.join(state._fields)}; correct LayerKind.parts"
                )
    names = jax.tree.map(lambda leaf: (None,) * leaf.ndim, state)
    axes = jax.tree.map(lambda leaf: (None,) * len(leaf), kind.axes(model), is_leaf=is_names)
    if axes != names:
        raise ConfigError(
            f"LayerKind.axes of the kind {name!r} returns {kind.axes(model)}, but the state has "
            f"arrays of the shapes {jax.tree.map(lambda leaf: leaf.shape, state)}; give every axis "
            "of every array a name or None"
        )
    for own in jax.tree.leaves(kind.axes(model), is_leaf=is_names):
        check_names(own, f"LayerKind.axes of the kind {name!r}")


def is_names(leaf: Any) -> bool:
    """Returns True for a tuple of names of axes, not for a NamedTuple (`is_leaf` of `jax.tree`)."""
    return type(leaf) is tuple


def replace_parts(
    kind: LayerKind, state: LayerState, donor: LayerState, parts: Collection[str]
) -> LayerState:
    """Returns `state`, in which those of `parts` that the kind has are taken from `donor`."""
    names = {field for part in parts for field in fields_of(kind, part, state)}
    return state._replace(**{name: getattr(donor, name) for name in names})
