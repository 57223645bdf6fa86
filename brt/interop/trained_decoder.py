"""A language model to start from: the workdir of a run, whose layers may have become others."""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.config import Config, Model
from brt.errors import CheckpointError
from brt.interop import trained
from brt.layers.stack import runs
from brt.training import saved


class Started(NamedTuple):
    """Parameters to start from, and where they are not simply the old ones.

    Attributes:
      lacking: names of new ones.
      unread: names of old ones that the new model has no place for.
    """

    params: PyTree[Array]
    lacking: list[str]
    unread: list[str]


def describe(directory: Path) -> tuple[Model, str]:
    """The model of a run, and the fingerprint of its tokenizer.

    Raises:
      CheckpointError: it is no run of a language model, or has no whole checkpoint.
    """
    if not trained.is_run(directory):
        raise CheckpointError(
            f"{directory} holds no language model: that is the workdir of a run, with checkpoints"
        )
    _, found, config = saved.load_config(directory)
    return _model(directory, config), found.meta["tokenizer"]


def start(directory: Path, model: Model, initial: PyTree[Array]) -> Started:
    """The newest parameters of a run, layer by layer: a layer of another kind takes what it knows.

    Args:
      model: that training starts with; `initial`: new parameters of it.

    Raises:
      CheckpointError: as `describe`, or an array has another shape.
    """
    workdir, found, config = saved.load_config(directory)
    old_model = _model(directory, config)
    old = _by_layer(saved.load(workdir, found, config).params, old_model)
    new = _by_layer(initial, model)
    for name, array in new.items():
        if name in old and old[name].shape != array.shape:
            raise CheckpointError(
                f"{directory}: {name} is {old[name].shape}, but this model's is {array.shape}; "
                "start from weights of the same sizes"
            )
    taken = {name: old.get(name, array) for name, array in new.items()}
    lacking = [name for name in new if name not in old]
    return Started(_by_run(taken, model), lacking, [name for name in old if name not in new])


def _model(directory: Path, config: Config) -> Model:
    task = config.training.objective
    if task != "language_modeling":
        raise CheckpointError(
            f"{directory} is the run of another model: {task} trains no language model"
        )
    return config.model


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
