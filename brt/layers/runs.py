"""Runs, which are neighbouring layers of one kind, and the states of all runs of a model.

The parameters and states of a run's layers are stacked, so that a scan can call one layer after the
other.
"""

from collections.abc import Collection, Mapping
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from brt.config import Model
from brt.config.checks import check
from brt.distributed.rules import Names
from brt.layers import kinds
from brt.layers.kinds import LayerKind
from brt.layers.state import LayerState, StateArray

# The states of all layers: a tuple with an entry for each run. Arrays have the batch on axis 0 and
# the layers of the run on axis 1.
StackState = tuple[LayerState, ...]
# The open blocks of all layers: a tuple with an entry for each run. Arrays have the layers of the
# run on axis 0 and the batch on axis 1.
StackBlock = tuple[PyTree[Array], ...]
# Maps the name of a run to its model state (statistics that layers learn without gradients), for
# runs of kinds that have one. Arrays have the layers of the run on axis 0.
ModelState = Mapping[str, PyTree[Array]]


class Run(NamedTuple):
    """Neighbouring layers of one kind with the same settings, with parameters stacked on axis 0."""

    # The kind and the index of the first layer, such as `window_0`. The run's parameters have this
    # name, too.
    name: str
    kind: str
    layers: int
    model: Model  # The settings as these layers see them (`Model.for_layer`).

    @property
    def layer_kind(self) -> LayerKind:
        return kinds.of(self.kind)

    @property
    def indices(self) -> range:
        """The indices of the run's layers in the model."""
        first = int(self.name.removeprefix(f"{self.kind}_"))
        return range(first, first + self.layers)


def runs(model: Model) -> list[Run]:
    """Returns the runs of a model, the lowest first. A run consists of all neighbouring layers that
    have the same kind and equal settings.
    """
    recurs = [kinds.of(kind).recurs for kind in model.layer_types]
    check(
        not model.feedback or any(recurs),
        f"Model.feedback = True needs a layer that recurs; none of {model.layer_types} does",
    )
    result: list[Run] = []

    def kind_and_settings(layer: int) -> tuple[str, Model]:
        return model.layer_types[layer], model.for_layer(layer)

    for (kind, seen), group in groupby(range(model.layers), kind_and_settings):
        indices = list(group)
        result.append(Run(f"{kind}_{indices[0]}", kind, len(indices), seen))
    return result


def check_states(model: Model) -> None:
    """Raises ConfigError if `parts` or `state` of a layer's `LayerKind` are wrong."""
    for run in runs(model):
        kinds.check_state(run.kind, run.model)


def new_stack_state(model: Model, batch: int, dtype: jnp.dtype) -> StackState:
    """Returns the states of all layers before the first token; keys and values have `dtype`."""

    def stacked(run: Run) -> LayerState:
        layer = run.layer_kind.new_state(run.model, batch, dtype)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], run.layers, axis=1), layer)

    return tuple(map(stacked, runs(model)))


def state_axes(model: Model) -> StackState:
    """Returns a `StackState` with the names of each array's axes in place of the array."""

    def names(array: StateArray) -> Names:
        return ("lanes", "layers", *array.axes)

    return tuple(jax.tree.map(names, run.layer_kind.state(run.model)) for run in runs(model))


def new_model_state(model: Model) -> ModelState:
    def stacked(run: Run, layer: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], run.layers, axis=0), layer)

    return {
        run.name: stacked(run, new(run.model))
        for run in runs(model)
        if (new := run.layer_kind.new_model_state) is not None
    }


def next_model_state(model: Model, model_state: ModelState) -> ModelState:
    """Returns the model state for the next train step.

    During a step, the calls of the layers collect statistics, for example the sums of the queries
    of a cluster. After the step, the function `LayerKind.settle` of each run's kind computes the
    new model state from these statistics, for example the new centroids.
    """
    by_name = {run.name: run for run in runs(model)}
    return {
        name: by_name[name].layer_kind.settle(by_name[name].model, own)
        for name, own in model_state.items()
    }


def parts(model: Model) -> set[str]:
    """Returns the names of the parts that the layers' states have (see `LayerKind.parts`)."""
    return set().union(*(kinds.of(kind).parts for kind in model.layer_types))


def replace_parts(
    model: Model, state: StackState, donor: StackState, replaced: Collection[str]
) -> StackState:
    """Returns `state`, in which the parts named in `replaced` are taken from the state `donor`."""

    def of_run(run: Run, own: LayerState, other: LayerState) -> LayerState:
        parts = (kinds.fields_of(run.layer_kind, part, own) for part in replaced)
        return own._replace(**{name: getattr(other, name) for part in parts for name in part})

    return tuple(of_run(*one) for one in zip(runs(model), state, donor, strict=True))
