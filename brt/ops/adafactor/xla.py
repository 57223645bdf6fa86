"""Adafactor's update of a stack of matrices by the functions of optax.

The arithmetic is that of `optax.adafactor` with momentum, for matrices whose second moments are
factored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

EPSILON = 1e-30  # This number is added to squared gradients.
MOMENTUM = 0.9
# The update is multiplied by the root mean square of the parameter, or by this number if the root
# mean square is smaller.
SMALLEST_SCALE = 1e-3


class Moments(NamedTuple):
    """Adafactor's state of a stack of L matrices with A rows and B columns."""

    # Moving averages of the squared gradients, averaged over the columns of each row.
    rows: Float[Array, "L A"]
    # Moving averages of the squared gradients, averaged over the rows of each column.
    columns: Float[Array, "L B"]
    # Moving averages of the updates.
    momentum: Float[Array, "L A B"]


class Updated(NamedTuple):
    """The result of an update of a stack of L matrices."""

    parameter: Float[Array, "L A ..."]
    moments: Moments
    # The sum of each matrix's squared gradients, which are first divided by `divisor`.
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
    """Implements `api.adafactor` by the functions of optax."""
    shape = moments.momentum.shape
    matrices = (gradient / divisor).reshape(shape), parameter.reshape(shape)
    updates, after = jax.vmap(_of_matrix)(*matrices, moments, decay, rate)
    updates = updates if factor == 1 else factor * updates
    new: Array = optax.apply_updates(parameter, updates.reshape(parameter.shape))
    return Updated(new, after, jnp.sum(jnp.square(matrices[0]), axis=(1, 2)))


def _of_matrix(
    gradient: Array, parameter: Array, moments: Moments, decay: Array, rate: Array
) -> tuple[Array, Moments]:
    """Returns the update and the new moments of one matrix."""
    # The parts of `optax.adafactor` are called one by one, because `optax.adafactor` itself would
    # compute the decay from a count of steps.
    squares = optax.scale_by_factored_rms(min_dim_size_to_factor=1, decay_rate_fn=lambda *_: decay)
    scale = optax.chain(
        optax.clip_by_block_rms(1.0), optax.scale(rate), optax.scale_by_param_block_rms()
    )
    momentum = optax.ema(MOMENTUM, debias=False, accumulator_dtype=jnp.float32)
    # optax calls the shorter of the two vectors v_row.
    rows, columns, before = moments
    tall = len(rows) > len(columns)
    short, long = (columns, rows) if tall else (rows, columns)
    count, unused = jnp.zeros((), jnp.int32), jnp.zeros((1,), gradient.dtype)
    factored = optax.FactoredState(count, short, long, unused)
    update, factored = squares.update(gradient, factored, parameter)
    update, _ = scale.update(update, scale.init(parameter), parameter)
    update, smooth = momentum.update(update, optax.EmaState(count, before))
    short, long = factored.v_row, factored.v_col
    rows, columns = (long, short) if tall else (short, long)
    return -1 * update, Moments(rows, columns, smooth.ema)
