"""The registry of kinds of layers.

A kind of layer consists of a Flax module and a `LayerKind` that describes the module. The function
`register_kind` adds a kind to the registry. The rest of brt handles all kinds in the same way.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from brt.config import SECTIONS, Model
from brt.config.fields import is_declared
from brt.config.kinds import KindSection, register_section
from brt.config.model import PARTS
from brt.distributed.rules import check_names
from brt.errors import ConfigError
from brt.layers.clustered import ClusteredLayer, clustered_flops, clustered_state
from brt.layers.recurrent import RecurrentLayer, recurrent_flops, recurrent_state
from brt.layers.sections import Clustered, Recurrence
from brt.layers.state import LayerState, StateArray, window_state
from brt.layers.window import WindowLayer, window_flops

# A state consists of these parts, each of which evaluation can reset or exchange.
STATE_PARTS = ("state", "cache", "memory")
# The first fields of every layer's module, in the order in which brt passes them.
_FIELDS = ("model", "training", "kernels")
# These are the class variables of `KindSection`. A section must not have settings of these names.
_CONSTANTS = ("kind", "any_window", "grouped_keys", "positive", "not_negative")
_METHODS = ("__call__", "begin_block", "decode_step", "end_block", "prepare_block")
_OPTIONAL = ("prepare_block",)


class LayerKind(NamedTuple):
    """Everything that the rest of brt knows about a kind of layer.

    The module of a kind has the fields `model`, `training` and `kernels`, and four methods, each of
    which returns a `LayerOutput`. The first method reads a segment of N blocks. The other three
    methods together read one block token by token, with the same result:

      __call__(x [B, T, D], given: state, document_start [B, N], feedback, summaries, model_state)
      begin_block(None, given: state, document_start, model_state)
      decode_step(x [B, 1, D], given: state, block, position, feedback, model_state)
      end_block(None, given: state, block, summaries, model_state)

    All arguments but x are fields of one `brt.layers.state.Given`, whose comments describe them.
    The output x has the shape and the dtype of the input x, and the state keeps the shapes and
    dtypes of `LayerKind.state`.

    An open block has the data of a block whose tokens are read one by one. `begin_block` and
    `decode_step` return the open block in the field `state` of their output. A layer may change its
    open block with every token, so a recurrence over tokens keeps its state in the open block.
    Where the token changes only some entries of an array, `decode_step` may return these alone
    (`brt.layers.state.NewEntries`), so that the array is not copied. A module whose open block
    contains a `brt.layers.state.OpenBlock` may have a fifth method, `prepare_block(None, given:
    block, position)`, which is called before several tokens are read one by one. It sets the field
    `ready` of the `OpenBlock`. After these tokens, brt sets the field to None.
    """

    module: type[nn.Module]
    # Returns the state of a layer with descriptions of arrays (`brt.layers.state.state_array`) in
    # place of arrays.
    state: Callable[[Model], LayerState]
    # Maps a part of the state ("cache", "state" or "memory") to the names of the fields that belong
    # to it; None stands for all fields. Evaluation can reset or exchange each part separately. A
    # field belongs to at most one part.
    parts: Mapping[str, tuple[str, ...] | None]
    # Returns the FLOPs per token of the forward pass; a multiplication and an addition count as
    # two. The function may call `brt.layers.window.window_flops` or `brt.layers.basic.mlp_flops`,
    # and add the FLOPs of further computations of the layer.
    flops: Callable[[Model], int]
    # The section of settings, which also lists the indices of the kind's layers. None for
    # sliding-window layers, which are all layers that no section lists.
    section: type[KindSection] | None = None
    # True if the layer's state has S state vectors in the field `vectors` [B, S, D], and its open
    # block has the keys and values of these vectors in the field `memory`.
    recurs: bool = False
    # True if the layer scans over the blocks or the tokens of a segment. The results of such a
    # layer are stored for its backward pass. Results of other layers are recomputed in the backward
    # pass on backends where this is faster.
    loops: bool = False
    # True if `decode_step` also accepts several tokens of a block, [B, T, D], the first of which
    # has the place `position`. brt then reads prompts T tokens at a time.
    reads_chunks: bool = False
    # Returns the number of vectors in which a layer summarises a block for the layer above; None if
    # layers of the kind neither read nor compute summaries.
    summaries: Callable[[Model], int] | None = None
    # Returns the model state of a layer at step 0 (`Given.model_state`); None if there is none.
    new_model_state: Callable[[Model], Any] | None = None
    # Computes the model state for the next train step from the model state that the calls of this
    # step have returned.
    settle: Callable[[Model, Any], Any] = lambda model, model_state: model_state

    def new_state(self, model: Model, batch: int, dtype: jnp.dtype) -> LayerState:
        """Returns the state of a layer that has read nothing; caches have `dtype`."""
        return jax.tree.map(lambda array: array.new(batch, dtype), self.state(model))


KINDS: dict[str, LayerKind] = {}


def register_kind(name: str, kind: LayerKind) -> None:
    """Adds a kind of layer, and its section of settings, to the registry under a name.

    Raises:
      ConfigError: the name is taken; the kind lacks something that every kind needs; or its
        section lists only layers of other kinds.
    """
    if name in KINDS:
        raise ConfigError(f"there is a kind of layers named {name!r} already; take another name")
    _check_kind(name, kind)
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


def _check_kind(name: str, kind: LayerKind) -> None:
    """Raises ConfigError for mistakes in the section, the module or the parts of a kind."""
    for part, fields in kind.parts.items():
        if part not in STATE_PARTS:
            raise ConfigError(
                f"LayerKind.parts of the kind {name!r} has the part {part!r}; the parts of a state "
                f"are {', '.join(map(repr, STATE_PARTS))}"
            )
        if isinstance(fields, str):
            raise ConfigError(
                f"LayerKind.parts of the kind {name!r} has {fields!r} as the fields of the part "
                f"{part!r}; write ({fields!r},), with a comma"
            )
    if kind.section is not None:
        _check_section(name, kind.section)
    elif name != "window":
        raise ConfigError(
            f"the LayerKind {name!r} has no section, so no layer can be of this kind; set "
            "LayerKind.section to a subclass of brt.config.kinds.KindSection"
        )
    _check_module(name, kind.module)


def _check_section(name: str, section: Any) -> None:
    if not (isinstance(section, type) and issubclass(section, KindSection)):
        raise ConfigError(
            f"LayerKind.section of the kind {name!r} is {section!r}; it must be a subclass of "
            "brt.config.kinds.KindSection"
        )
    shown, fields = section.__name__, {field.name: field for field in dataclasses.fields(section)}
    for constant in _CONSTANTS:
        if constant in fields:
            raise ConfigError(
                f"{shown}.{constant} is no setting; annotate it as a class variable, "
                f"`{constant}: ClassVar[...] = ...`"
            )
    if section.layers_by_kind is KindSection.layers_by_kind:
        if not isinstance(getattr(section, "kind", None), str):
            raise ConfigError(
                f"the section {shown} does not say which kind it describes; add the class variable "
                f"`kind: ClassVar[str] = {name!r}`"
            )
        if "layers" not in fields:
            raise ConfigError(
                f"the section {shown} has no field `layers`; decorate the class with "
                "@dataclasses.dataclass(frozen=True, kw_only=True), and declare "
                "`layers: tuple[int, ...] = adaptable(())`"
            )
    for field in fields.values():
        if not is_declared(field):
            raise ConfigError(
                f"no function of brt.config.fields declares the field {field.name} of the section "
                f"{shown}; write, for example, `{field.name}: ... = adaptable(...)`"
            )


def _check_module(name: str, module: Any) -> None:
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise ConfigError(
            f"LayerKind.module of the kind {name!r} is {module!r}; it must be a subclass "
            "of flax.linen.Module"
        )
    shown = f"the module {module.__name__} of the kind {name!r}"
    fields = tuple(field.name for field in dataclasses.fields(module))
    if fields[: len(_FIELDS)] != _FIELDS:
        raise ConfigError(
            f"{shown} must begin with the fields {', '.join(_FIELDS)}, because brt creates it as "
            "module(model, training, kernels); it has the fields "
            f"{', '.join(field for field in fields if field not in ('parent', 'name')) or 'none'}"
        )
    for method in _METHODS:
        # For a class without `__call__`, `getattr` would find `type.__call__` of the metaclass.
        found = next((vars(base)[method] for base in module.__mro__ if method in vars(base)), None)
        if found is None and method in _OPTIONAL:
            continue
        if not callable(found):
            raise ConfigError(
                f"{shown} has no method {method}; help(brt.layers.kinds.LayerKind) describes the "
                "four methods of a layer"
            )
        try:
            inspect.signature(found).bind("self", "x", "given")
        except TypeError as error:
            raise ConfigError(
                f"{shown}: {method} does not accept the arguments that brt passes to every kind; "
                f"declare it as {method}(self, x, given)"
            ) from error


register_kind(
    "window",
    LayerKind(WindowLayer, window_state, {"cache": None}, window_flops, reads_chunks=True),
)
register_kind(
    "recurrent",
    LayerKind(
        RecurrentLayer, recurrent_state, {"cache": ("window",), "state": ("vectors", "valid")},
        recurrent_flops, Recurrence, recurs=True, loops=True, reads_chunks=True,
    ),
)  # fmt: skip
register_kind(
    "clustered",
    LayerKind(
        ClusteredLayer, clustered_state,
        {"cache": ("window",), "memory": ("keys", "values", "rest", "totals", "filled")},
        clustered_flops, Clustered, loops=True,
    ),
)  # fmt: skip


def of(name: str) -> LayerKind:
    if name not in KINDS:
        raise ConfigError(
            f"there is no kind of layers {name!r}, only {', '.join(map(repr, KINDS))}"
        )
    return KINDS[name]


def fields_of(kind: LayerKind, part: str, state: LayerState) -> tuple[str, ...]:
    """Returns the names of the state's fields that belong to a part (see `STATE_PARTS`)."""
    fields = kind.parts.get(part, ())
    return state._fields if fields is None else fields


def check_state(name: str, model: Model) -> None:
    """Raises ConfigError if a kind's `parts` or the descriptions of its state arrays are wrong."""
    kind = of(name)
    state = kind.state(model)
    for part in kind.parts:
        for field in fields_of(kind, part, state):
            if field not in state._fields:
                raise ConfigError(
                    f"the kind {name!r} counts a field {field!r} to the part {part!r}, but its "
                    f"state has the fields {', '.join(state._fields)}; correct LayerKind.parts"
                )
    for array in jax.tree.leaves(state):
        if not isinstance(array, StateArray):
            raise ConfigError(
                f"LayerKind.state of the kind {name!r} has a {type(array).__name__} among its "
                "fields; describe every array by brt.layers.state.state_array"
            )
        if type(array.axes) is not tuple or len(array.axes) != len(array.shape):
            raise ConfigError(
                f"LayerKind.state of the kind {name!r} has an array of the shape {array.shape} "
                f"with the names of axes {array.axes!r}; give every axis a name or None"
            )
        check_names(array.axes, f"LayerKind.state of the kind {name!r}")
