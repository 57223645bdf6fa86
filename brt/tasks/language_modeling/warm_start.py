"""Starting from another language model, whose layers may have become others."""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.config import Model
from brt.errors import CheckpointError
from brt.layers.stack import ModelState, runs
from brt.tasks.weights import Started, Weights


def start(model: Model, weights: Weights, initial: PyTree[Array]) -> Started:
    """The weights layer by layer: a layer of another kind takes what it knows.

    Args:
      model: that training starts with; `initial`: new parameters of it.

    Raises:
      CheckpointError: an array has another shape.
    """
    old = _by_layer(weights.load(), weights.model)
    new = _by_layer(initial, model)
    for name, array in new.items():
        if name in old and old[name].shape != array.shape:
            raise CheckpointError(
                f"{weights.where}: {name} is {old[name].shape}, but this model's is {array.shape}; "
                "start from weights of the same sizes"
            )
    taken = {name: old.get(name, array) for name, array in new.items()}
    lacking = [name for name in new if name not in old]
    return Started(_by_run(taken, model), lacking, [name for name in old if name not in new])


def start_model_state(model: Model, weights: Weights, initial: ModelState) -> ModelState:
    """What the weights' layers have learned without gradients, where layers are as they were.

    Args:
      initial: of `model`, at step 0.
    """
    if not initial:
        return initial
    old, rows = _rows(weights.load_model_state(), weights.model), _rows(initial, model)
    taken = {place: old.get(place, row) for place, row in rows.items()}
    found, first = {}, 0
    for run, kind, count in runs(model):
        if run in initial:
            own = [taken[kind, first + i] for i in range(count)]
            found[run] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)
        first += count
    return found


def _rows(model_state: ModelState, model: Model) -> dict[tuple[str, int], PyTree[Array]]:
    """By kind and place of the layer."""
    found, first = {}, 0
    for run, kind, count in runs(model):
        for i in range(count if run in model_state else 0):
            found[kind, first + i] = jax.tree.map(lambda leaf, i=i: leaf[i], model_state[run])
        first += count
    return found


def _by_layer(params: PyTree[Array], model: Model) -> dict[str, Array]:
    """{"layer 3: tokens/keys": array}; what is of no layer under its own name."""
    flat, found, first = flatten_dict(params, sep="/"), {}, 0
    for run, _, count in runs(model):
        prefix = f"stack/{run}/"
        for name in [name for name in flat if name.startswith(prefix)]:
            rows = flat.pop(name)
            for i in range(count):
                found[f"layer {first + i}: {name.removeprefix(prefix)}"] = rows[i]
        first += count
    return {**found, **flat}


def _by_run(arrays: dict[str, Array], model: Model) -> PyTree[Array]:
    """The way back."""
    rest, flat, first = dict(arrays), {}, 0
    for run, _, count in runs(model):
        own = f"layer {first}: "
        for name in [name.removeprefix(own) for name in arrays if name.startswith(own)]:
            rows = [rest.pop(f"layer {first + i}: {name}") for i in range(count)]
            flat[f"stack/{run}/{name}"] = jnp.stack(rows)
        first += count
    return unflatten_dict({**flat, **rest}, sep="/")
