"""Learning-rate schedules and optimizers."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Optimizer

Parameters = PyTree[Array]


def learning_rate(
    optimizer: Optimizer, steps: int
) -> Callable[[Int[Array, ""] | Float[Array, ""]], Float[Array, ""]]:
    """The learning rate at a step, from 1; linear warm-up, then the schedule.

    rsqrt is the paper's 1 / sqrt(step); cosine and linear go down to
    `final_learning_rate` at `steps` and stay there.
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
        t = jnp.maximum(jnp.asarray(step, jnp.float32), max(warmup, 1))
        warm = jnp.minimum(jnp.asarray(step, jnp.float32) / max(warmup, 1), 1.0)
        return warm * shape(jnp.minimum(t, steps) if decays else t)

    return rate


class LayerwiseState(NamedTuple):
    """State of the parameters of no layer, and of each run of stacked layers, by its path."""

    outside: optax.OptState
    runs: dict[str, optax.OptState]


def layerwise(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `transform` to every layer of a stacked run on its own.

    Adafactor clips and scales by root mean squares of whole parameters: over a stack of
    layers they would mix, and the model would train differently than unstacked.
    """

    def init(params: Parameters) -> LayerwiseState:
        outside, runs = _split(params)
        state = {name: jax.vmap(transform.init)(run) for name, run in runs.items()}
        return LayerwiseState(transform.init(outside), state)

    def update(
        gradients: Parameters, state: LayerwiseState, params: Parameters
    ) -> tuple[Parameters, LayerwiseState]:
        (outside, runs), (p_outside, p_runs) = _split(gradients), _split(params)
        updates, after = transform.update(outside, state.outside, p_outside)
        pairs = {
            name: jax.vmap(transform.update)(run, state.runs[name], p_runs[name])
            for name, run in runs.items()
        }
        updates = _joined(updates, {name: pair[0] for name, pair in pairs.items()})
        return updates, LayerwiseState(after, {name: pair[1] for name, pair in pairs.items()})

    return optax.GradientTransformation(init, update)


def _split(tree: Parameters) -> tuple[Parameters, dict[str, Parameters]]:
    """What is of no layer; and stack/RUN of a decoder, encoder/layers, decoder/layers."""
    outside, runs = {}, {}
    for path, leaf in flatten_dict(tree).items():
        if path[0] == "stack" or path[1:2] == ("layers",):
            runs.setdefault("/".join(path[:2]), {})[path[2:]] = leaf
        else:
            outside[path] = leaf
    return unflatten_dict(outside), {name: unflatten_dict(run) for name, run in runs.items()}


def _joined(outside: Parameters, runs: dict[str, Parameters]) -> Parameters:
    """The way back."""
    flat = flatten_dict(outside)
    for name, run in runs.items():
        flat |= {(*name.split("/"), *path): leaf for path, leaf in flatten_dict(run).items()}
    return unflatten_dict(flat)


def build(optimizer: Optimizer, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run; `update` needs the parameters.

    Adafactor is the original's: factored second moments, updates clipped to a root mean
    square of 1, multiplied by the learning rate and the parameter's scale, momentum.
    """
    rate = learning_rate(optimizer, steps)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        return rate(count + 1)  # optax counts from 0, where a warm-up would be wasted

    if optimizer.name == "adafactor":
        transform = optax.adafactor(
            schedule,
            min_dim_size_to_factor=optimizer.min_dim_size_to_factor,
            decay_rate=optimizer.second_moment_decay,
            momentum=optimizer.momentum or None,
        )
    else:
        transform = optax.adamw(
            schedule, b1=optimizer.b1, b2=optimizer.b2, weight_decay=optimizer.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )  # fmt: skip
    transform = layerwise(transform)
    if optimizer.clip_norm:
        transform = optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), transform)
    return transform
