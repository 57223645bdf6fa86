"""Reference implementation of Adafactor's update of a stack of matrices.

The arithmetic is that of `optax.adafactor` with momentum, for matrices whose second moments are
factored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-30  # This number is added to squared gradients.
MOMENTUM = 0.9
# If the root mean square of a parameter is smaller, the update is scaled by this number.
SMALLEST_SCALE = 1e-3


class Moments(NamedTuple):
    """Adafactor's state of a stack of L matrices with A rows and B columns.

    Attributes:
      rows, columns: moving averages of the squared gradients, averaged over the columns of each row
        and over the rows of each column.
      momentum: moving average of the updates.
    """

    rows: Float[Array, "L A"]
    columns: Float[Array, "L B"]
    momentum: Float[Array, "L A B"]


class Updated(NamedTuple):
    """The result of an update of a stack of L matrices.

    Attributes:
      parameter: [L, A, *columns], the new parameters.
      moments: the new state.
      squares: the sum of the squared gradients of each matrix, after their division.
    """

    parameter: Float[Array, "L A ..."]
    moments: Moments
    squares: Float[Array, " L"]


def adafactor(
    gradient: Float[Array, "L A ..."],
    parameter: Float[Array, "L A ..."],
    moments: Moments,
    decay: Float[Array, " L"],
    rate: Float[Array, " L"],
    factor: float = 1.0,
    divisor: Float[Array, ""] | float = 1.0,
) -> Updated:
    """Returns the new parameters and moments of each matrix of a stack.

    Args:
      gradient, parameter: [L, A, *columns]; *columns are axes that are merged to the B columns.
      moments: the state before the update.
      decay: the share of the previous second moments in the new ones.
      rate: the learning rate.
      factor: the update of the parameter, not of the momentum, is multiplied by this number.
      divisor: the gradients are first divided by this number.
    """
    shape = moments.momentum.shape
    matrices = (gradient / divisor).reshape(shape), parameter.reshape(shape)
    after = jax.vmap(_new_moments)(*matrices, moments, decay, rate)
    new = parameter - factor * after.momentum.reshape(parameter.shape)
    return Updated(new, after, jnp.sum(matrices[0] ** 2, axis=(1, 2)))


def _new_moments(
    gradient: Array, parameter: Array, moments: Moments, decay: Array, rate: Array
) -> Moments:
    """Returns the new moments of one matrix; see `adafactor`."""
    square = gradient**2 + EPSILON
    rows = decay * moments.rows + (1 - decay) * jnp.mean(square, axis=1)
    columns = decay * moments.columns + (1 - decay) * jnp.mean(square, axis=0)
    # optax divides the shorter of the two vectors by its mean.
    mean = jnp.mean(rows) if len(rows) <= len(columns) else jnp.mean(columns)
    update = gradient * (rows / mean)[:, None] ** -0.5 * columns[None] ** -0.5
    update /= jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)))
    update *= rate * jnp.maximum(jnp.sqrt(jnp.mean(parameter**2)), SMALLEST_SCALE)
    momentum = MOMENTUM * moments.momentum + (1 - MOMENTUM) * update
    return Moments(rows, columns, momentum)
