"""The interface of an optimizer: a step from gradients to new parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Float

from brt.training.layerwise import Parameters


class Stepped(NamedTuple):
    """The result of a step of an optimizer.

    Attributes:
      params: the new parameters.
      state: the new state of the optimizer.
      gradient_norm: the norm of the divided gradients, before they are clipped.
    """

    params: Parameters
    state: Any
    gradient_norm: Float[Array, ""]


class Stepper(NamedTuple):
    """An optimizer that returns new parameters.

    Attributes:
      init: returns the initial state for parameters.
      update: returns the updates, which are added to the parameters, and the new state, from the
        gradients, the state and the parameters.
      step: returns the new parameters, the new state and the norm of the gradients from the same
        arguments as `update` and a number by which the gradients are first divided, such as the
        number of tokens. It may compute them without computing the updates.
    """

    init: Callable[[Parameters], optax.OptState]
    update: Callable[[Parameters, Any, Parameters], tuple[Parameters, optax.OptState]]
    step: Callable[[Parameters, Any, Parameters, Float[Array, ""]], Stepped]


def stepper(transform: optax.GradientTransformation) -> Stepper:
    """Returns an optimizer of optax that adds its updates to the parameters in `step`."""

    def step(
        gradients: Parameters, state: Any, params: Parameters, divisor: Float[Array, ""]
    ) -> Stepped:
        """Returns the result of a step; see `Stepper`."""
        gradients = divided(gradients, divisor)
        norm = optax.tree.norm(gradients)
        updates, state = transform.update(gradients, state, params)
        return Stepped(optax.apply_updates(params, updates), state, norm)

    return Stepper(transform.init, transform.update, step)


def divided(gradients: Parameters, divisor: Float[Array, ""]) -> Parameters:
    """Returns the gradients, divided by a number."""
    return jax.tree.map(lambda g: g / divisor, gradients)
