"""The parameters that training changes (Training.trainable); all other parameters are frozen.

Frozen parameters have no gradients and no optimizer state, and no step changes them.
"""

from collections.abc import Sequence

from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from brt.config import Config
from brt.training import adapters, parameter_paths


def patterns(config: Config) -> tuple[str, ...]:
    """Returns patterns that match the paths of trained parameters; () if all parameters are
    trained.

    If the model has adapters, only the adapters and the parameters that Training.trainable names
    are trained.
    """
    own = config.training.trainable
    return (*own, f"{adapters.ROOT}/*") if config.adapter.rank else own


def split(params: PyTree, patterns: Sequence[str]) -> tuple[PyTree, PyTree]:
    """Separates the parameters that are trained from those that are frozen.

    Args:
      params: the tree of all parameters.
      patterns: the result of `patterns`; without patterns, all parameters are trained.

    Returns:
      The tree of the trained parameters, and the tree of the frozen parameters. Both trees have the
      structure of `params`, but each lacks the parameters of the other.
    """
    if not patterns:
        return params, {}
    trained, frozen = {}, {}
    for path, leaf in flatten_dict(params, sep="/").items():
        (trained if parameter_paths.matches(path, patterns) else frozen)[path] = leaf
    return unflatten_dict(trained, sep="/"), unflatten_dict(frozen, sep="/")


def merge(trained: PyTree, frozen: PyTree) -> PyTree:
    """Returns the tree of all parameters from the trees of trained and of frozen parameters; the
    inverse of `split`.
    """
    if not frozen:
        return trained
    flat = flatten_dict(trained, sep="/") | flatten_dict(frozen, sep="/")
    return unflatten_dict(flat, sep="/")


def check(params: PyTree, patterns: Sequence[str]) -> None:
    """Checks that every pattern matches the path of a parameter.

    Args:
      params: the tree of all parameters, or of their shapes.
      patterns: Training.trainable.

    Raises:
      ConfigError: a pattern matches no parameter.
    """
    paths = list(flatten_dict(params, sep="/"))
    parameter_paths.check("Training.trainable", patterns, paths, "parameters of the model")
