"""Updates parameters by Adafactor, with kernels for matrices.

The op `brt.ops.adafactor` returns new parameters instead of updates, so that a kernel can read and
write each array once. The state is that of `optax.adafactor`. All parameters that have no kernel,
such as vectors, are updated by optax. On CPUs and GPUs, and if arrays are sharded over devices,
these are all parameters.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int

from brt.ops.adafactor import Moments, adafactor, has_kernel
from brt.training import layerwise
from brt.training.layerwise import Group, LayerwiseState, Parameters, Stepped, divided
from brt.training.matrices import Axes, ends_with_heads

# A function from gradients, state, parameters and divisor to the result of a step.
Step: TypeAlias = Callable[[Parameters, Any, Parameters, Array], Stepped]
_DECAY = -0.8  # The exponent in optax's formula of the decay of the second moments.


class Rules(NamedTuple):
    """What an update of Adafactor depends on, except arrays."""

    transform: optax.GradientTransformation  # `optax.adafactor`, for parameters without a kernel
    # A function from the number of completed steps to the learning rate of the next step.
    schedule: Callable[[Int[Array, ""]], Float[Array, ""]]
    axes: Axes  # names of each parameter's axes, by the parameter's path
    factor: Callable[[str], float]  # from a parameter's path to the factor of its learning rate
    smallest: int  # matrices with a smaller dimension do not have factored second moments
    implementation: str  # of the op; see `brt.config.Kernels`


class _Arrays(NamedTuple):
    """The arrays of parameters that are all outside of stacks, or in stacks of equally many layers.

    The separate form (`brt.training.layer_forms`) has lists, by layer, of arrays and of states.
    """

    depth: str  # the number of layers, or "" if the arrays have no axis of layers
    gradients: Group  # by path, reshaped to matrices
    state: Any  # the state of the optimizer
    params: Group  # by path, reshaped to matrices

    def layers(self) -> list["_Arrays"]:
        gradients, params = (
            layerwise.layers_of(group, len(self.state)) for group in (self.gradients, self.params)
        )
        return [_Arrays("", *layer) for layer in zip(gradients, self.state, params, strict=True)]


class _Updated(NamedTuple):
    """The new arrays of an `_Arrays`, in the form of the old ones."""

    params: Group
    state: Any
    squares: Float[Array, ""]  # the sum of the squared gradients, after their division


class _Stack(NamedTuple):
    """A stack of matrices [L, A, *columns] with a kernel: the first inputs of the op."""

    gradient: Array
    parameter: Array
    moments: Moments


# The shapes of parameters in the model, without the axis of layers in the separate form, by path.
Shapes: TypeAlias = dict[str, tuple[int, ...]]


def step(
    gradients: Parameters,
    state: LayerwiseState,
    params: Parameters,
    divisor: Float[Array, ""],
    plain: Step,
    rules: Rules,
) -> Stepped:
    """Returns the new parameters, the new state of the optimizer, and the norm of the gradients.

    The kernels divide the gradients by `divisor` as they read them, and return the sums of their
    squares. `state` is that of `layerwise.layerwise(rules.transform)`; `plain` is the same function
    without kernels.
    """
    outside, stacked = layerwise.split(gradients, rules.axes)
    p_outside, p_stacked = layerwise.split(params, rules.axes)
    groups = [_Arrays("", outside, state.outside, p_outside)] + [
        _Arrays(depth, group, state.stacked[depth], p_stacked[depth])
        for depth, group in stacked.items()
    ]
    flat = flatten_dict(params, sep="/")
    shapes = {name: (x[0] if isinstance(x, list) else x).shape for name, x in flat.items()}
    if not any(_has_kernels(group, shapes, rules) for group in groups):
        return plain(gradients, state, params, divisor)
    first, *others = (_of_group(group, divisor, shapes, rules) for group in groups)
    new, squares = dict(first.params), first.squares
    for one in others:
        new |= one.params
        squares += one.squares
    states = {depth: one.state for depth, one in zip(stacked, others, strict=True)}
    new_params = layerwise.joined(new, params, rules.axes)
    return Stepped(new_params, LayerwiseState(first.state, states), jnp.sqrt(squares))


def _has_kernels(group: _Arrays, shapes: Shapes, rules: Rules) -> bool:
    if isinstance(group.state, list):
        group, *_ = group.layers()
    return bool(_stacks(group, shapes, rules))


def _stacks(group: _Arrays, shapes: Shapes, rules: Rules) -> dict[str, _Stack]:
    """Returns the matrices of a group, not in the separate form, that have a kernel, by path."""
    depth, gradients, state, params = group
    factored, ema = (_part(state, kind) for kind in (optax.FactoredState, optax.EmaState))
    found = {}
    for name, matrix in params.items():
        size = matrix.shape[bool(depth) :]
        if len(size) != 2 or min(size) < rules.smallest:
            continue
        kept = ends_with_heads(rules.axes.get(name, ()))
        shape = shapes[name] if kept else matrix.shape
        vectors = _ordered(factored.v_row[name], factored.v_col[name], size)
        stack = _Stack(
            gradients[name].reshape(shape), matrix.reshape(shape),
            Moments(vectors[0], vectors[1], ema.ema[name]),
        )  # fmt: skip
        stack = stack if depth else jax.tree.map(lambda x: x[None], stack)
        g, p, moments = stack
        if has_kernel(g, p, moments, rules.implementation):
            found[name] = stack
    return found


def _of_group(group: _Arrays, divisor: Float[Array, ""], shapes: Shapes, rules: Rules) -> _Updated:
    """Returns the new parameters and state of a group; optax updates matrices without kernels."""
    if isinstance(group.state, list):
        layers = [_of_group(layer, divisor, shapes, rules) for layer in group.layers()]
        squares = jnp.sum(jnp.stack([one.squares for one in layers]))
        new = layerwise.lists_of([one.params for one in layers])
        return _Updated(new, [one.state for one in layers], squares)
    depth, gradients, state, params = group
    stacks = _stacks(group, shapes, rules)
    others = params.keys() - stacks
    update = jax.vmap(rules.transform.update) if depth else rules.transform.update
    rest = divided(_restricted(gradients, others), divisor)
    updates, after = update(rest, *(_restricted(tree, others) for tree in (state, params)))
    new = {}
    for name, change in updates.items():
        factor = rules.factor(name)
        scaled = change if factor == 1 else factor * change
        new[name] = optax.apply_updates(params[name], scaled)
    count = _part(state, optax.FactoredState).count
    counts = count if depth else count[None]
    decay = 1.0 - jnp.asarray(counts + 1, jnp.float32) ** _DECAY
    scalars = decay, jax.vmap(rules.schedule)(counts)
    moments, squares = {}, optax.tree.norm(rest, squared=True)
    for name, stack in stacks.items():
        found = adafactor(
            *stack, *scalars, rules.factor(name), divisor, implementation=rules.implementation
        )
        squares += jnp.sum(found.squares)
        found = found if depth else jax.tree.map(lambda x: x[0], found)
        moments[name] = found.moments
        new[name] = found.parameter.reshape(params[name].shape)
    return _Updated(new, _with_moments(after, moments, depth), squares)


def _ordered(first: Array, second: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns the vectors of rows and columns; optax calls the shorter one v_row."""
    rows, columns = shape
    return (first, second) if rows <= columns else (second, first)


def _part(state: Any, kind: type) -> Any:
    return next(part for part in state if isinstance(part, kind))


def _restricted(state: Any, names: Iterable[str]) -> Any:
    """Returns the part of a group, or of its state, that belongs to parameters of these paths."""
    return jax.tree.map(
        lambda x: {n: x[n] for n in names} if isinstance(x, dict) else x, state,
        is_leaf=lambda x: isinstance(x, dict),
    )  # fmt: skip


def _with_moments(state: Any, found: dict[str, Moments], depth: str) -> Any:
    """Adds the moments of parameters with a kernel, by path, to optax's state of the others."""
    vectors, unused, momenta = {}, {}, {}
    for name, (rows, columns, momentum) in found.items():
        vectors[name] = _ordered(rows, columns, momentum.shape[bool(depth) :])
        # optax has an array of this shape for the second moments that are not factored.
        unused[name] = jnp.zeros((*momentum.shape[: bool(depth)], 1), momentum.dtype)
        momenta[name] = momentum

    def completed(part: Any) -> Any:
        if isinstance(part, optax.FactoredState):
            short, long = ({n: pair[i] for n, pair in vectors.items()} for i in range(2))
            return part._replace(
                v_row=part.v_row | short, v_col=part.v_col | long, v=part.v | unused
            )
        return part._replace(ema=part.ema | momenta) if isinstance(part, optax.EmaState) else part

    return tuple(map(completed, state))
