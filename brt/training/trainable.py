"""The parameters that training changes (Training.trainable); all other parameters are frozen.

Frozen parameters have no gradients and no optimizer state, and no step changes them.
"""

from collections.abc import Sequence

from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from brt.config import Config
from brt.training import adapters, parameter_paths


def patterns(config: Config) -> tuple[str, ...]:
    """Returns patterns of the paths of trained parameters; () if all are trained.

    If the model has adapters, these and the parameters of Training.trainable are trained.
    """
    own = config.training.trainable
    return (*own, f"{adapters.ROOT}/*") if config.adapter.rank else own


def split(params: PyTree, patterns: Sequence[str]) -> tuple[PyTree, PyTree]:
    """Separates the trained parameters, which match `patterns`, from the frozen ones."""
    if not patterns:
        return params, {}
    trained, frozen = {}, {}
    for path, leaf in flatten_dict(params, sep="/").items():
        (trained if parameter_paths.matches(path, patterns) else frozen)[path] = leaf
    return unflatten_dict(trained, sep="/"), unflatten_dict(frozen, sep="/")


def merge(trained: PyTree, frozen: PyTree) -> PyTree:
    if not frozen:
        return trained
    flat = flatten_dict(trained, sep="/") | flatten_dict(frozen, sep="/")
    return unflatten_dict(flat, sep="/")


def check(params: PyTree, patterns: Sequence[str]) -> None:
    """Raises ConfigError if a pattern of Training.trainable matches no parameter."""
    paths = list(flatten_dict(params, sep="/"))
    parameter_paths.check("Training.trainable", patterns, paths, "parameters of the model")
