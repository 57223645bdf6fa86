"""Optimizers that treat each layer of a stack of parameters separately.

A model may store the parameters of equal layers as one array (a stack) with an axis of layers.
Adafactor clips and scales updates by root mean squares over a parameter. If these were computed
over a stack, the layers would influence each other, and the model would train differently than
without stacking.

The functions accept both forms of parameters (`brt.training.layer_forms`): in the separate form, a
list with an array for each layer takes the place of a stack.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, PyTree

from brt.training.matrices import Axes, as_matrix, from_matrix

Parameters: TypeAlias = PyTree[Array]
# Maps the paths of parameters to matrices. For a stack of layers in the separate form, the value is
# a list with the matrix of each layer.
Group: TypeAlias = dict[str, Any]


class LayerwiseState(NamedTuple):
    """State of an optimizer that treats layers separately."""

    outside: optax.OptState  # state of the parameters that are not stacked by layer
    # Maps a number of layers, as a string, to the state of all stacks with this number of layers.
    # Every array of the state has a first axis of layers. In the separate form, the value is a list
    # with one state for each layer instead.
    stacked: dict[str, Any]


def split(tree: Parameters, axes: Axes) -> tuple[Group, dict[str, Group]]:
    """Converts parameters to matrices, and separates stacks of layers from other parameters.

    Returns the group of the parameters outside of stacks, and a dictionary from each number of
    layers, as a string, to the group of the stacks with this number of layers. `axes` maps the path
    of each parameter to the names of its axes.
    """
    outside: Group = {}
    stacked: dict[str, Group] = {}
    for name, leaf in flatten_dict(tree, sep="/").items():
        names = axes.get(name, ())
        group = outside
        if names[:1] == ("layers",):
            group = stacked.setdefault(str(len(leaf)), {})
        if isinstance(leaf, list):
            group[name] = [as_matrix(names[1:], layer) for layer in leaf]
        else:
            group[name] = as_matrix(names, leaf)
    return outside, stacked


def joined(matrices: Group, like: Parameters, axes: Axes) -> Parameters:
    """Inverts `split`: converts matrices to a tree with the structure and shapes of `like`."""

    def in_shape_of(leaf: Any, name: str) -> Any:
        names, matrix = axes.get(name, ()), matrices[name]
        if not isinstance(leaf, list):
            return from_matrix(names, matrix, leaf.shape)
        pairs = zip(matrix, leaf, strict=True)
        return [from_matrix(names[1:], layer, array.shape) for layer, array in pairs]

    flat = flatten_dict(like, sep="/")
    return unflatten_dict({name: in_shape_of(leaf, name) for name, leaf in flat.items()}, sep="/")


class Arrays(NamedTuple):
    """The arrays of all parameters outside of stacks, or of all stacks of the same depth.

    The depth is the number of layers in a stack.
    """

    depth: str  # the number of layers, as a string; "" outside of stacks
    gradients: Group
    state: Any  # the optimizer's state; in the separate form, a list with each layer's state
    params: Group

    def layers(self) -> list["Arrays"]:
        """Returns a list of the arrays of each layer; [self] if layers are not in separate form."""
        if not isinstance(self.state, list):
            return [self]
        gradients, params = (
            [{name: leaf[i] for name, leaf in group.items()} for i in range(len(self.state))]
            for group in (self.gradients, self.params)
        )
        return [Arrays("", *layer) for layer in zip(gradients, self.state, params, strict=True)]


def grouped(
    gradients: Parameters, state: LayerwiseState, params: Parameters, axes: Axes
) -> list[Arrays]:
    """Returns an `Arrays` of the parameters outside of stacks, and one for each depth of stacks."""
    (outside, stacked), (p_outside, p_stacked) = split(gradients, axes), split(params, axes)
    return [Arrays("", outside, state.outside, p_outside)] + [
        Arrays(depth, group, state.stacked[depth], p_stacked[depth])
        for depth, group in stacked.items()
    ]


def updated(
    update: Callable[[Arrays], tuple[Group, Any, Any]],
    groups: list[Arrays],
    like: Parameters,
    axes: Axes,
) -> tuple[Parameters, LayerwiseState, list[tuple]]:
    """Calls `update` for each group or, in the separate form, for each layer of each group.

    `update` returns new arrays, a new state and a further result. `updated` returns all new arrays
    as a tree like `like`, the new state, and for each group a tuple of the further results.
    """
    arrays: Group = {}
    states, rest = {}, []
    for group in groups:
        layers, state, found = zip(*map(update, group.layers()), strict=True)
        if isinstance(group.state, list):
            arrays |= {name: [layer[name] for layer in layers] for name in layers[0]}
            states[group.depth] = list(state)
        else:
            arrays |= layers[0]
            states[group.depth] = state[0]
        rest.append(found)
    return joined(arrays, like, axes), LayerwiseState(states.pop(""), states), rest


def layerwise(transform: optax.GradientTransformation, axes: Axes) -> optax.GradientTransformation:
    """Returns an optimizer that applies `transform` to each layer of a stack separately.

    `transform` is also applied to the parameters outside of stacks, to all of them as one group. It
    gets parameters as matrices (`as_matrix`).
    """

    def init(params: Parameters) -> LayerwiseState:
        outside, stacked = split(params, axes)
        state = {depth: jax.vmap(transform.init)(group) for depth, group in stacked.items()}
        return LayerwiseState(transform.init(outside), state)

    def update_group(group: Arrays) -> tuple[Group, Any, Any]:
        update = jax.vmap(transform.update) if group.depth else transform.update
        return *update(*group[1:]), ()

    def update(
        gradients: Parameters, state: LayerwiseState, params: Parameters
    ) -> tuple[Parameters, LayerwiseState]:
        groups = grouped(gradients, state, params, axes)
        return updated(update_group, groups, gradients, axes)[:2]

    return optax.GradientTransformation(init, update)


class Stepped(NamedTuple):
    """The result of a step of an optimizer."""

    params: Parameters
    state: Any
    gradient_norm: Float[Array, ""]  # norm of gradients / divisor, before they are clipped


class Stepper(NamedTuple):
    """An optimizer that returns new parameters."""

    init: Callable[[Parameters], optax.OptState]
    # A function of gradients, state, parameters and a divisor, such as the number of tokens. The
    # function first divides the gradients by the divisor.
    step: Callable[[Parameters, Any, Parameters, Float[Array, ""]], Stepped]


def stepper(transform: optax.GradientTransformation) -> Stepper:
    """Returns an optimizer of optax as a `Stepper`, whose `step` adds updates to parameters."""

    def step(
        gradients: Parameters, state: Any, params: Parameters, divisor: Float[Array, ""]
    ) -> Stepped:
        gradients = divided(gradients, divisor)
        norm = optax.tree.norm(gradients)
        updates, state = transform.update(gradients, state, params)
        return Stepped(optax.apply_updates(params, updates), state, norm)

    return Stepper(transform.init, step)


def divided(gradients: Parameters, divisor: Float[Array, ""]) -> Parameters:
    return jax.tree.map(lambda g: g / divisor, gradients)
