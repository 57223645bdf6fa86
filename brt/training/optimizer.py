"""Learning-rate schedules and optimizers."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Optimizer
from brt.training import muon, rates
from brt.training.matrices import Axes, as_matrix, from_matrix

Parameters: TypeAlias = PyTree[Array]
# If a dimension of a matrix is below this number, Adafactor does not factor its second moments.
SMALLEST_FACTORED = 128


def learning_rate(
    optimizer: Optimizer, steps: int
) -> Callable[[Int[Array, ""] | Float[Array, ""]], Float[Array, ""]]:
    """Returns the schedule: a function from a step, counted from 1, to the learning rate.

    After a linear warm-up, the learning rate follows Optimizer.schedule:

        rsqrt     learning_rate / sqrt(step), as in the Block-Recurrent Transformer's paper
        cosine    half a cosine that reaches `final_learning_rate` at step `steps`
        linear    a line that reaches `final_learning_rate` at step `steps`
        constant  learning_rate

    "cosine" and "linear" stay at `final_learning_rate` after step `steps`. Rounding never takes a
    learning rate beyond this value, so no learning rate is negative.

    Args:
      optimizer: settings, such as `learning_rate`, `final_learning_rate` and `warmup_steps`.
      steps: Training.steps, the number of steps of the run.
    """
    top, low, warmup = (
        optimizer.learning_rate,
        optimizer.final_learning_rate,
        optimizer.warmup_steps,
    )
    shapes = {
        "rsqrt": lambda t: top / jnp.sqrt(t),
        "cosine": lambda t: low + (top - low) * 0.5 * (1 + jnp.cos(jnp.pi * t / steps)),
        "linear": lambda t: top + (low - top) * t / steps,
        "constant": lambda t: jnp.full_like(t, top),
    }
    shape, decays = shapes[optimizer.schedule], optimizer.schedule in ("cosine", "linear")

    def rate(step: Int[Array, ""] | Float[Array, ""]) -> Float[Array, ""]:
        """Returns the learning rate of a step, which is counted from 1."""
        t = jnp.maximum(jnp.asarray(step, jnp.float32), max(warmup, 1))
        warm = jnp.minimum(jnp.asarray(step, jnp.float32) / max(warmup, 1), 1.0)
        if not decays:
            return warm * shape(t)
        return warm * jnp.clip(shape(jnp.minimum(t, steps)), min(low, top), max(low, top))

    return rate


class LayerwiseState(NamedTuple):
    """State of the optimizer that `layerwise` returns.

    Attributes:
      outside: state of the parameters that are not stacked by layer.
      stacked: states of stacked parameters, by the number of layers in the stack (as a string).
        Every array of these states has a first axis of layers.
    """

    outside: optax.OptState
    stacked: dict[str, optax.OptState]


def layerwise(transform: optax.GradientTransformation, axes: Axes) -> optax.GradientTransformation:
    """Returns an optimizer that treats each layer of a stack separately, and kernels as matrices.

    A model may store the parameters of equal layers as one array (a stack) with an axis of layers.
    Adafactor clips and scales updates by root mean squares over a parameter. If these were computed
    over a stack, the layers would influence each other, and the model would train differently than
    without stacking. Adafactor also factors the second moments of matrices, so kernels with an axis
    of heads are reshaped to matrices.

    Args:
      transform: the optimizer that is applied to each layer.
      axes: names of each parameter's axes, by the parameter's path.
    """

    def split(tree: Parameters) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
        """Separates the parameters in `tree` that are stacked by layer from all others.

        Returns:
          A dict from paths to the other parameters; and for each number of layers, as a string, a
          dict from paths to the parameters in stacks of this number of layers.
        """
        outside, stacked = {}, {}
        for name, leaf in flatten_dict(tree, sep="/").items():
            names = axes.get(name, ())
            group = outside
            if names[:1] == ("layers",):
                group = stacked.setdefault(str(len(leaf)), {})
            group[name] = as_matrix(names, leaf)
        return outside, stacked

    def unflatten(updates: dict[str, Array], like: Parameters) -> Parameters:
        """Returns the updates, which are matrices by path, as a tree with the shapes of `like`."""
        shapes = {name: leaf.shape for name, leaf in flatten_dict(like, sep="/").items()}
        kernels = {n: from_matrix(axes.get(n, ()), updates[n], s) for n, s in shapes.items()}
        return unflatten_dict(kernels, sep="/")

    def init(params: Parameters) -> LayerwiseState:
        """Returns the initial state of the optimizer for the parameters `params`."""
        outside, stacked = split(params)
        state = {depth: jax.vmap(transform.init)(group) for depth, group in stacked.items()}
        return LayerwiseState(transform.init(outside), state)

    def update(
        gradients: Parameters, state: LayerwiseState, params: Parameters
    ) -> tuple[Parameters, LayerwiseState]:
        """Returns the updates that are added to the parameters, and the new state of the optimizer.

        Args:
          gradients: gradients of the parameters.
          state: state of the optimizer before the update.
          params: the parameters.
        """
        (outside, stacked), (p_outside, p_stacked) = split(gradients), split(params)
        updates, outside_state = transform.update(outside, state.outside, p_outside)
        stacked_states = {}
        for depth, group in stacked.items():
            layer_updates, stacked_states[depth] = jax.vmap(transform.update)(
                group, state.stacked[depth], p_stacked[depth]
            )
            updates |= layer_updates
        return unflatten(updates, gradients), LayerwiseState(outside_state, stacked_states)

    return optax.GradientTransformation(init, update)


def build(optimizer: Optimizer, steps: int, axes: Axes) -> optax.GradientTransformation:
    """Returns the optimizer of a run: Adafactor, AdamW or Muon, with its learning-rate schedule.

    The `update` of the optimizer needs the parameters as third argument. If Optimizer.clip_norm is
    set, every optimizer first clips the norm of the gradients. Adafactor is used as in the code of
    Block-Recurrent Transformers: the second moments of matrices are factored, and its updates are
    clipped to a root mean square of 1, multiplied by the learning rate and the scale of the
    parameter, and smoothed by momentum.

    Args:
      optimizer: settings.
      steps: Training.steps, the number of steps of the run.
      axes: names of each parameter's axes, by the parameter's path; see `state.parameter_axes`.
        The names say which axes are heads. All three optimizers treat an attention kernel as a
        matrix (see `brt.training.matrices`), which is possible only if its axes have names.
    """
    rate = learning_rate(optimizer, steps)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the learning rate of the step after `count` completed steps."""
        # optax counts steps from 0, and the learning rate of step 0 would be 0.
        return rate(count + 1)

    if optimizer.name == "muon":
        transform = muon.build(optimizer, schedule, axes)
    elif optimizer.name == "adafactor":
        adafactor = optax.adafactor(
            schedule,
            min_dim_size_to_factor=SMALLEST_FACTORED,
            momentum=0.9,
        )
        transform = layerwise(adafactor, axes)
    else:
        adamw = optax.adamw(
            schedule, b1=optimizer.b1, b2=optimizer.b2, weight_decay=optimizer.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )  # fmt: skip
        transform = layerwise(adamw, axes)
    transform = rates.with_rates(transform, optimizer)
    if optimizer.clip_norm:
        transform = optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), transform)
    return transform
