"""Optimizers that treat each layer of a stack of parameters separately, and kernels as matrices.

A model may store the parameters of equal layers as one array (a stack) with an axis of layers.
Adafactor clips and scales updates by root mean squares over a parameter. If these were computed
over a stack, the layers would influence each other, and the model would train differently than
without stacking. Adafactor also factors the second moments of matrices, so kernels with an axis of
heads are reshaped to matrices.

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
# Matrices by the path of the parameter. For a stack of layers in the separate form, there is a list
# of matrices.
Group: TypeAlias = dict[str, Any]


class LayerwiseState(NamedTuple):
    """State of an optimizer that treats layers separately."""

    outside: optax.OptState  # state of the parameters that are not stacked by layer
    # States of stacked parameters, by the number of layers in the stack (as a string). Every array
    # of these states has a first axis of layers. In the separate form, there is a list with a state
    # for each layer instead.
    stacked: dict[str, Any]


def split(tree: Parameters, axes: Axes) -> tuple[Group, dict[str, Group]]:
    """Returns the parameters outside of stacks, and those in stacks of layers, as matrices by path.

    `axes` has the names of each parameter's axes, by path. The stacks are grouped by their number
    of layers, as a string.
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
    """Returns matrices as a tree with the structure and shapes of `like`; inverts `split`."""

    def kernel(name: str, leaf: Any) -> Any:
        names, matrix = axes.get(name, ()), matrices[name]
        if not isinstance(leaf, list):
            return from_matrix(names, matrix, leaf.shape)
        pairs = zip(matrix, leaf, strict=True)
        return [from_matrix(names[1:], layer, one.shape) for layer, one in pairs]

    flat = flatten_dict(like, sep="/")
    return unflatten_dict({name: kernel(name, leaf) for name, leaf in flat.items()}, sep="/")


def layers_of(group: Group, layers: int) -> list[Group]:
    """Returns the group of each layer from a group of lists; the inverse of `lists_of`."""
    return [{name: leaf[i] for name, leaf in group.items()} for i in range(layers)]


def lists_of(groups: list[Group]) -> Group:
    return {name: [group[name] for group in groups] for name in groups[0]}


def layerwise(transform: optax.GradientTransformation, axes: Axes) -> optax.GradientTransformation:
    """Returns an optimizer that applies `transform` to each layer of a stack, as matrices."""

    def init(params: Parameters) -> LayerwiseState:
        outside, stacked = split(params, axes)
        state = {depth: jax.vmap(transform.init)(group) for depth, group in stacked.items()}
        return LayerwiseState(transform.init(outside), state)

    def update(
        gradients: Parameters, state: LayerwiseState, params: Parameters
    ) -> tuple[Parameters, LayerwiseState]:
        (outside, stacked), (p_outside, p_stacked) = split(gradients, axes), split(params, axes)
        updates, outside_state = transform.update(outside, state.outside, p_outside)
        stacked_states = {}
        for depth, group in stacked.items():
            layer_updates, stacked_states[depth] = _update_stack(
                transform, group, state.stacked[depth], p_stacked[depth]
            )
            updates |= layer_updates
        return joined(updates, gradients, axes), LayerwiseState(outside_state, stacked_states)

    return optax.GradientTransformation(init, update)


def _update_stack(
    transform: optax.GradientTransformation, gradients: Group, state: Any, params: Group
) -> tuple[Group, Any]:
    """Updates all parameters with the same number of layers, for each layer separately."""
    if not isinstance(state, list):
        return jax.vmap(transform.update)(gradients, state, params)
    layers = layers_of(gradients, len(state)), state, layers_of(params, len(state))
    results = [transform.update(*layer) for layer in zip(*layers, strict=True)]
    updates, states = zip(*results, strict=True)
    return lists_of(list(updates)), list(states)


class Stepped(NamedTuple):
    """The result of a step of an optimizer."""

    params: Parameters
    state: Any
    gradient_norm: Float[Array, ""]  # of the divided gradients, before they are clipped


class Stepper(NamedTuple):
    """An optimizer that returns new parameters."""

    init: Callable[[Parameters], optax.OptState]
    # From gradients, state and parameters to the updates, which are added to the parameters, and
    # the new state.
    update: Callable[[Parameters, Any, Parameters], tuple[Parameters, optax.OptState]]
    # From the same arguments and a number by which the gradients are first divided, such as the
    # number of tokens, to the new parameters. It may compute them without computing the updates.
    step: Callable[[Parameters, Any, Parameters, Float[Array, ""]], Stepped]


def stepper(transform: optax.GradientTransformation) -> Stepper:
    """Returns an optimizer of optax that adds its updates to the parameters in `step`."""

    def step(
        gradients: Parameters, state: Any, params: Parameters, divisor: Float[Array, ""]
    ) -> Stepped:
        gradients = divided(gradients, divisor)
        norm = optax.tree.norm(gradients)
        updates, state = transform.update(gradients, state, params)
        return Stepped(optax.apply_updates(params, updates), state, norm)

    return Stepper(transform.init, transform.update, step)


def divided(gradients: Parameters, divisor: Float[Array, ""]) -> Parameters:
    return jax.tree.map(lambda g: g / divisor, gradients)
