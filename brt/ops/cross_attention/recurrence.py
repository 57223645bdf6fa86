"""The states R of segments: each state summarizes the other segments of the source (SRformer, Long
et al. 2023, section 3.2).

Each segment j has the product A_j of its keys and values (`key_value_sums`). The state of a segment
is the sum of the products of all other segments, passed through accumulate-and-fire neurons. States
depend on the source alone. Gradients are hand-written where autodiff would be slow on CPUs or would
mix dtypes. No axes are merged, because sources and heads may be sharded. In shapes, M is the number
of segments of a source, and S the number of positions of a segment.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.cross_attention.accumulate_fire import accumulate_fire
from brt.ops.cross_attention.config import CrossConfig


class RecurrenceParameters(NamedTuple):
    """Learned float32 parameters of the recurrence of a layer, shared by all heads.

    Parameters that the configuration does not use are None.
    """

    # The matrix W, which maps value features to inputs of the neurons.
    kernel: Float[Array, "K K"] | None = None
    leak: Float[Array, ""] | None = None
    threshold: Float[Array, ""] | None = None
    # The weight of the softmax attention; the recurrence has the weight 1 - sigma.
    sigma: Float[Array, ""] | None = None
    gate: Float[Array, ""] | None = None  # the factor of the output of the recurrence


class RecurrentStates(NamedTuple):
    """The states of the segments, with which queries are multiplied."""

    states: Float[Array, "M B H K K"]  # R, in the dtype of the keys
    scale: Float[Array, "B H 1 K"] | None  # gate / norm(K) of each output feature; None for 1
    # The fraction of the entries of the states R that are above 0; None without neurons.
    firing_rate: Float[Array, ""] | None


class NeuronMetrics(NamedTuple):
    """Metrics of the accumulate-and-fire neurons, for logging; all are None without neurons."""

    firing_rate: Float[Array, ""] | None = None  # as in `RecurrentStates`
    leak: Float[Array, ""] | None = None
    threshold: Float[Array, ""] | None = None


def leak_and_threshold(
    parameters: RecurrenceParameters,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    leak, threshold = (x for x in (parameters.leak, parameters.threshold) if x is not None)
    return leak, threshold


def recurrence(
    keys: Float[Array, "M B H S K"],
    values: Float[Array, "M B H S K"],
    counts: Int[Array, " B"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
) -> RecurrentStates:
    """Returns the states of all segments (equations 13 and 16), from float32 sums and neurons.

    The keys and values must be zeros where a source is padded.
    """
    products = key_value_sums(keys, values, parameters, config)
    inputs = neuron_inputs(products, sum_segments(products), parameters, config)
    rate = None
    if config.use_raf:
        inputs, rate = accumulate_fire(inputs, counts, *leak_and_threshold(parameters))
    return RecurrentStates(inputs.astype(keys.dtype), output_scale(keys, parameters, config), rate)


def key_value_sums(
    keys: Float[Array, "*B S K"],
    values: Float[Array, "*B S K"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
) -> Float[Array, "*B K K"]:
    """Returns the float32 product A_j = K_j^T V_j W for the keys and values of each segment.

    Without neurons, the factor W is left out. It is also left out if `config.clamp` is set, because
    the sums must then be clamped before `neuron_inputs` multiplies them by W.
    """
    if config.use_raf and not config.clamp:
        values = matmul(values, parameters.kernel)
    return _key_value_sums(keys, values)


def neuron_inputs(
    products: Float[Array, "M *B K K"],
    total: Float[Array, "*B K K"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
) -> Float[Array, "M *B K K"]:
    """Returns the neurons' inputs X_j = P_j W for every segment j, or P_j if there are no neurons.

    P_j is the sum of the products A_i over all segments i other than j, or A_j itself if
    `config.kv_source` is "segment". If `config.clamp` is set, the products and their sum `total`
    are first clipped to this bound. If it is not set, the products already contain the factor W.
    """
    if config.clamp:
        products, total = (jnp.clip(x, -config.clamp, config.clamp) for x in (products, total))
    x = products if config.kv_source == "segment" else _other_segments(products, total)
    return matmul(x, parameters.kernel) if config.use_raf and config.clamp else x


def output_scale(
    keys: Float[Array, "M B H S K"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
    squares: Float[Array, "B H 1 K"] | None = None,
) -> Float[Array, "B H 1 K"] | None:
    """Returns the factor of each feature of the recurrence's output, or None for the factor 1.

    The factor is the gate, or 1 if there is no gate. If `config.norm` is "feature", the factor is
    divided by the norm of the feature over all keys of the source. `squares` is the result of
    `key_squares`, if known.
    """
    gate, scale = parameters.gate, None
    if config.norm == "feature":
        squares = key_squares(keys) if squares is None else squares
        scale = inverse_norm(squares, config.norm_epsilon)
    if gate is None:
        return scale
    if scale is None:
        scale = jnp.ones((*keys.shape[1:3], 1, keys.shape[4]), jnp.float32)
    return gate * scale


def key_squares(keys: Float[Array, "M B H S K"]) -> Float[Array, "B H 1 K"]:
    """Returns, for each feature of the keys, the sum of its squares over all source positions."""
    squares = jnp.square(keys.astype(jnp.float32))
    # The sum over positions is a matrix product with ones, which is faster on XLA's CPU backend.
    ones = jnp.ones((*keys.shape[:3], 1, keys.shape[3]), jnp.float32)
    return jnp.sum(jnp.matmul(ones, squares, precision="highest"), axis=0)


def inverse_norm(squares: Float[Array, "B H 1 K"], epsilon: float) -> Float[Array, "B H 1 K"]:
    sums = squares + epsilon**2
    return jnp.where(sums > 0, jax.lax.rsqrt(jnp.where(sums > 0, sums, 1.0)), 1.0)


def sum_segments(x: Float[Array, "M *B"]) -> Float[Array, "*B"]:
    # A product with ones is faster on CPUs (see `brt.ops.reductions`).
    return jnp.tensordot(jnp.ones(x.shape[:1], x.dtype), x, axes=1, precision="highest")


@jax.custom_vjp
def matmul(x: Array, kernel: Array) -> Array:
    return jnp.einsum("...c,ce->...e", x, kernel.astype(x.dtype))


def _matmul_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    rows = tuple(range(x.ndim - 1))
    d_kernel = jax.lax.dot_general(
        x, gradient, ((rows, rows), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.einsum("...e,ce->...c", gradient, kernel.astype(gradient.dtype)), d_kernel


matmul.defvjp(lambda x, kernel: (matmul(x, kernel), (x, kernel)), _matmul_backward)


@jax.custom_vjp
def _other_segments(own: Array, total: Array) -> Array:
    """Returns P_j for each segment j: `total` without the segment's own product."""
    return total[None] - own


_other_segments.defvjp(
    lambda own, total: (_other_segments(own, total), None),
    lambda _, gradient: (-gradient, sum_segments(gradient)),
)


@jax.custom_vjp
def _key_value_sums(keys: Array, values: Array) -> Array:
    return jnp.einsum("...sc,...se->...ce", keys, values, preferred_element_type=jnp.float32)


def _sums_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    keys, values = residuals
    # The gradient is float32. It is converted to the dtype of the keys, so that the products and
    # their results have this dtype.
    gradient = gradient.astype(keys.dtype)
    return (
        jnp.einsum("...se,...ce->...sc", values, gradient),
        jnp.einsum("...sc,...ce->...se", keys, gradient),
    )


_key_value_sums.defvjp(lambda *x: (_key_value_sums(*x), x), _sums_backward)
