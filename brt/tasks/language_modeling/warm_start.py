"""Warm start from another language model, which may have other kinds of layers.

A run is a sequence of neighbouring layers of one kind (`brt.layers.runs`). The arrays that a
parameter has in the layers of a run are stacked in one array.
"""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.config import Model
from brt.errors import CheckpointError
from brt.layers.runs import ModelState, runs
from brt.tasks.weights import WarmStart, Weights


def start(model: Model, weights: Weights, initial: PyTree[Array]) -> WarmStart:
    """Returns initial parameters, which are taken from weights layer by layer.

    If a layer of the model has another kind than the layer of the weights, only the parameters that
    both kinds have are taken. A layer that also attends to recurrent states has an output kernel of
    two parts, for attention to tokens and for attention to states. If the weights lack the second
    part, only the first part is taken from them. Raises CheckpointError if an array has another
    shape.
    """
    old = by_layer(weights.load(), weights.model)
    new = by_layer(initial, model)
    missing = [name for name in new if name not in old]
    for name, array in new.items():
        # If the model's layer has an output kernel [2, H, K, D] for two attentions (H heads of K
        # dimensions, vectors of D), the weights may have the kernel [1, H, K, D] for attention to
        # tokens alone.
        one_attention = name.endswith("/output") and array.shape[0] == 2 and (1, *array.shape[1:])
        if name in old and old[name].shape == one_attention:
            old[name] = jnp.concatenate([old[name], array[1:].astype(old[name].dtype)])
            missing.append(f"{name} for attention to states")
        elif name in old and old[name].shape != array.shape:
            raise CheckpointError(
                f"{weights.where}: {name} is {old[name].shape}, but this model's is {array.shape}; "
                "start from weights of the same sizes"
            )
    merged = {name: old.get(name, array) for name, array in new.items()}
    return WarmStart(_by_run(merged, model), missing, [name for name in old if name not in new])


def start_model_state(model: Model, weights: Weights, initial: ModelState) -> ModelState:
    """Returns the initial model state.

    The state of a layer is taken from the weights if the layer has the same kind there.
    """
    if not initial:
        return initial
    old = _layer_states(weights.load_model_state(), weights.model)
    # `old` also has the states of layers that have another kind in the model. They are not read
    # below, because their keys contain the kind that the layer has in the weights.
    layers = {**_layer_states(initial, model), **old}
    return {
        run.name: jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *(layers[run.kind, i] for i in run.indices)
        )
        for run in runs(model)
        if run.name in initial
    }


def _layer_states(model_state: ModelState, model: Model) -> dict[tuple[str, int], PyTree[Array]]:
    """Returns the state of each layer, by kind and index of the layer, from stacked states."""
    return {
        (run.kind, layer): jax.tree.map(lambda leaf, i=i: leaf[i], model_state[run.name])
        for run in runs(model)
        if run.name in model_state
        for i, layer in enumerate(run.indices)
    }


def by_layer(params: PyTree[Array], model: Model, form: str = "layer {}: ") -> dict[str, Array]:
    """Separates stacked parameters by layer, and returns them by name.

    A name is, for example, "layer 3: tokens/keys". `form` is the beginning of the names, in which
    {} stands for the index of the layer.
    """
    flat, layers = flatten_dict(params, sep="/"), {}
    for run in runs(model):
        prefix = f"stack/{run.name}/"
        for name in [name for name in flat if name.startswith(prefix)]:
            rows = flat.pop(name)
            for i, layer in enumerate(run.indices):
                layers[form.format(layer) + name.removeprefix(prefix)] = rows[i]
    return {**layers, **flat}


def _by_run(arrays: dict[str, Array], model: Model) -> PyTree[Array]:
    """Stacks parameters of consecutive layers of one kind again; the inverse of `by_layer`."""
    rest, flat = dict(arrays), {}
    for run in runs(model):
        prefix = f"layer {run.indices[0]}: "
        for name in [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]:
            rows = [rest.pop(f"layer {layer}: {name}") for layer in run.indices]
            flat[f"stack/{run.name}/{name}"] = jnp.stack(rows)
    return unflatten_dict({**flat, **rest}, sep="/")
