"""Updates parameters by Adafactor, matrices by the op `brt.ops.adafactor`.

The op returns new parameters instead of updates, so that a kernel can read and write each array
once. The state is that of `optax.adafactor`. Parameters whose second moments are not factored, such
as vectors, are updated by optax.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int

from brt.ops.adafactor import Moments, adafactor
from brt.training import layerwise
from brt.training.layerwise import Group, LayerwiseState, Parameters
from brt.training.matrices import Axes, ends_with_heads

_DECAY = -0.8  # The exponent in optax's formula of the decay of the second moments.


class Rules(NamedTuple):
    """What an update of Adafactor depends on, except arrays.

    Attributes:
      transform: `optax.adafactor`, for parameters that are no matrices.
      schedule: the learning rate of the step after a number of completed steps.
      axes: names of each parameter's axes, by the parameter's path.
      factor: a function from a parameter's path to the factor of its learning rate.
      smallest: if a dimension of a matrix is below this number, its second moments are not
        factored.
      implementation: the implementation of the op; see `brt.config.Kernels`.
    """

    transform: optax.GradientTransformation
    schedule: Callable[[Int[Array, ""]], Float[Array, ""]]
    axes: Axes
    factor: Callable[[str], float]
    smallest: int
    implementation: str


def step(
    gradients: Parameters, state: LayerwiseState, params: Parameters, rules: Rules
) -> tuple[Parameters, LayerwiseState]:
    """Returns the new parameters, and the new state of the optimizer.

    Args:
      gradients: gradients of the parameters.
      state: state of the optimizer `layerwise.layerwise(rules.transform)`.
      params: the parameters.
      rules: settings of Adafactor.
    """
    axes = rules.axes
    (outside, stacked), (p_outside, p_stacked) = (
        layerwise.split(tree, axes) for tree in (gradients, params)
    )
    shapes = {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()}
    new, outside_state = _of_group(outside, state.outside, p_outside, shapes, rules)
    stacked_states = {}
    for depth, group in stacked.items():
        of_layers, stacked_states[depth] = _of_group(
            group, state.stacked[depth], p_stacked[depth], shapes, rules, stacked=True
        )
        new |= of_layers
    return layerwise.joined(new, params, axes), LayerwiseState(outside_state, stacked_states)


def _of_group(
    gradients: Group,
    state: Any,
    params: Group,
    shapes: dict[str, tuple[int, ...]],
    rules: Rules,
    stacked: bool = False,
) -> tuple[Group, Any]:
    """Returns the new parameters of a group, and its new state.

    Args:
      gradients, params: arrays by path, reshaped to matrices.
      state: the state of `rules.transform`.
      shapes: shapes of the parameters in the model.
      rules: settings of Adafactor.
      stacked: True if every array has a first axis of layers.
    """
    matrices = [n for n, x in params.items() if _is_factored(x.shape[stacked:], rules.smallest)]
    others = params.keys() - matrices
    update = jax.vmap(rules.transform.update) if stacked else rules.transform.update
    updates, after = update(*(_restricted(tree, others) for tree in (gradients, state, params)))
    new = {}
    for name, change in updates.items():
        factor = rules.factor(name)
        scaled = change if factor == 1 else factor * change
        new[name] = optax.apply_updates(params[name], scaled)
    found = {}
    for name in matrices:
        shape = shapes[name] if ends_with_heads(rules.axes.get(name, ())) else params[name].shape
        g, p = (tree[name].reshape(shape) for tree in (gradients, params))
        value, found[name] = _of_matrix(name, g, p, state, rules, stacked)
        new[name] = value.reshape(params[name].shape)
    return new, _with_moments(after, found, stacked)


def _is_factored(shape: tuple[int, ...], smallest: int) -> bool:
    return len(shape) == 2 and min(shape) >= smallest


def _of_matrix(
    name: str, gradient: Array, parameter: Array, state: Any, rules: Rules, stacked: bool
) -> tuple[Array, Moments]:
    """Returns the new value and moments of a matrix or of a stack of matrices.

    Args:
      name: path of the parameter.
      gradient, parameter: the gradient and the value.
      state: state of the parameter's group.
      rules: settings of Adafactor.
      stacked: True if every array has a first axis of layers.
    """
    factored, ema = (_part(state, kind) for kind in (optax.FactoredState, optax.EmaState))
    momentum = ema.ema[name]
    vectors = _ordered(factored.v_row[name], factored.v_col[name], momentum.shape[stacked:])
    moments = Moments(vectors[0], vectors[1], momentum)
    decay = 1.0 - jnp.asarray(factored.count + 1, jnp.float32) ** _DECAY
    rate = (jax.vmap(rules.schedule) if stacked else rules.schedule)(factored.count)
    inputs = gradient, parameter, moments, decay, rate
    if not stacked:
        inputs = jax.tree.map(lambda x: x[None], inputs)
    new, after = adafactor(*inputs, rules.factor(name), implementation=rules.implementation)
    return (new, after) if stacked else jax.tree.map(lambda x: x[0], (new, after))


def _ordered(first: Array, second: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns the vectors of rows and columns from optax's v_row and v_col, or the reverse.

    optax calls the shorter vector v_row.
    """
    rows, columns = shape
    return (first, second) if rows <= columns else (second, first)


def _part(state: Any, kind: type) -> Any:
    """Returns the part of optax's state that has the given type."""
    return next(part for part in state if isinstance(part, kind))


def _restricted(state: Any, names: Iterable[str]) -> Any:
    """Returns the part of a group, or of its state, that belongs to the parameters with these
    paths.
    """
    return jax.tree.map(
        lambda x: {n: x[n] for n in names} if isinstance(x, dict) else x, state,
        is_leaf=lambda x: isinstance(x, dict),
    )  # fmt: skip


def _with_moments(state: Any, found: dict[str, Moments], stacked: bool) -> Any:
    """Returns optax's state with the moments of further parameters.

    Args:
      state: the state of the other parameters.
      found: moments by path.
      stacked: True if every array has a first axis of layers.
    """
    vectors, unused, momenta = {}, {}, {}
    for name, (rows, columns, momentum) in found.items():
        vectors[name] = _ordered(rows, columns, momentum.shape[stacked:])
        # optax has an array of this shape for the second moments that are not factored.
        unused[name] = jnp.zeros((*momentum.shape[: int(stacked)], 1), momentum.dtype)
        momenta[name] = momentum

    def completed(part: Any) -> Any:
        """Returns a part of the state with the arrays of the matrices."""
        if isinstance(part, optax.FactoredState):
            short, long = ({n: pair[i] for n, pair in vectors.items()} for i in range(2))
            return part._replace(
                v_row=part.v_row | short, v_col=part.v_col | long, v=part.v | unused
            )
        return part._replace(ema=part.ema | momenta) if isinstance(part, optax.EmaState) else part

    return tuple(map(completed, state))
