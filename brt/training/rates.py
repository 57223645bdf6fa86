"""Multiplies learning rates and weight decays of chosen parameters by factors (Optimizer.rates)."""

import operator
from functools import partial

import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.config import Optimizer
from brt.errors import ConfigError
from brt.training import parameter_paths


def with_rates(
    transform: optax.GradientTransformation, optimizer: Optimizer
) -> optax.GradientTransformation:
    """Returns an optimizer with the factors of learning rates and weight decays in Optimizer.rates.

    The updates of Adafactor, AdamW and Muon are proportional to the learning rate, so the updates
    are multiplied by its factor. AdamW and Muon use the parameters only for weight decay, so the
    parameters that they get are multiplied by the factor of the weight decay. Adafactor uses the
    parameters for another purpose, and has no weight decay.
    """
    if not optimizer.rates:
        return transform

    def update(
        gradients: PyTree[Array], state: optax.OptState, params: PyTree[Array]
    ) -> tuple[PyTree[Array], optax.OptState]:
        if optimizer.name != "adafactor":
            params = _multiplied(params, optimizer, 1)
        updates, state = transform.update(gradients, state, params)
        return _multiplied(updates, optimizer, 0), state

    return optax.GradientTransformation(transform.init, update)


def _multiplied(tree: PyTree[Array], optimizer: Optimizer, which: int) -> PyTree[Array]:
    """Multiplies arrays by the factors of the learning rate (`which` = 0) or weight decay (1)."""
    flat = flatten_dict(tree, sep="/")
    for path, leaf in flat.items():
        if (factor := factors_of(path, optimizer)[which]) != 1:
            flat[path] = jax.tree.map(partial(operator.mul, factor), leaf)
    return unflatten_dict(flat, sep="/")


def factors_of(path: str, optimizer: Optimizer) -> tuple[float, float]:
    """Returns the factors of learning rate and weight decay of the first pattern that matches."""
    for pattern, rate, decay in optimizer.rates:
        if parameter_paths.matches(path, [pattern]):
            return rate, decay
    return 1.0, 1.0


def check(trained: PyTree, optimizer: Optimizer) -> None:
    """Raises ConfigError if a pattern matches no trained parameter, or all learning rates are 0."""
    paths = list(flatten_dict(trained, sep="/"))
    patterns = [pattern for pattern, _, _ in optimizer.rates]
    parameter_paths.check("Optimizer.rates", patterns, paths, "trained parameters")
    if not any(factors_of(path, optimizer)[0] for path in paths):
        raise ConfigError(
            f"Optimizer.rates = {optimizer.rates} multiplies all learning rates by 0, so that "
            "nothing would be trained; choose a factor above 0 for some parameters"
        )


def describe(trained: PyTree, optimizer: Optimizer) -> str:
    """Lists the factors of Optimizer.rates other than 1, and how many parameters they change."""
    sizes: dict[tuple[float, float], int] = {}
    for path, leaf in flatten_dict(trained, sep="/").items():
        factors = factors_of(path, optimizer)
        sizes[factors] = sizes.get(factors, 0) + leaf.size
    parts = [
        f"learning rate x {rate:g} and weight decay x {decay:g} for {size:,} parameters"
        for (rate, decay), size in sorted(sizes.items(), reverse=True)
        if (rate, decay) != (1, 1)
    ]
    return f"Optimizer.rates: {'; '.join(parts)}" if parts else ""
