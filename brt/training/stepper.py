"""The interface of an optimizer: a step from gradients to new parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Float

from brt.training.layerwise import Parameters


class Stepped(NamedTuple):
    """The result of a step of an optimizer."""

    params: Parameters
    state: Any
    gradient_norm: Float[Array, ""]  # of the divided gradients, before they are clipped


class Stepper(NamedTuple):
    """An optimizer that returns new parameters."""

    init: Callable[[Parameters], optax.OptState]
    # From gradients, state and parameters to the updates, which are added to the parameters, and
    # the new state.
    update: Callable[[Parameters, Any, Parameters], tuple[Parameters, optax.OptState]]
    # From the same arguments and a number by which the gradients are first divided, such as the
    # number of tokens, to the new parameters. It may compute them without computing the updates.
    step: Callable[[Parameters, Any, Parameters, Float[Array, ""]], Stepped]


def stepper(transform: optax.GradientTransformation) -> Stepper:
    """Returns an optimizer of optax that adds its updates to the parameters in `step`."""

    def step(
        gradients: Parameters, state: Any, params: Parameters, divisor: Float[Array, ""]
    ) -> Stepped:
        gradients = divided(gradients, divisor)
        norm = optax.tree.norm(gradients)
        updates, state = transform.update(gradients, state, params)
        return Stepped(optax.apply_updates(params, updates), state, norm)

    return Stepper(transform.init, transform.update, step)


def divided(gradients: Parameters, divisor: Float[Array, ""]) -> Parameters:
    return jax.tree.map(lambda g: g / divisor, gradients)
