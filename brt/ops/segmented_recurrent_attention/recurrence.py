"""The states R of every segment, which summarize the other segments of the source (section 3.2).

Each segment j has the product A_j = K_j^T V_j of its keys and values. The state of a segment is the
sum of this product over all other segments, passed through accumulate-and-fire neurons. States
depend on the source alone, so a source has one set of states for all target positions. Gradients
are hand-written where autodiff would be slow on CPUs or would mix dtypes. No axes are merged,
because sources and heads may be sharded.

In shapes, B is the number of sources, M of segments, S of source positions of a segment, H of
heads, and K of numbers of a head; *B stands for any leading axes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.segmented_recurrent_attention.accumulate_fire import accumulate_fire
from brt.ops.segmented_recurrent_attention.config import CrossConfig


class RecurrenceParameters(NamedTuple):
    """Learned parameters of the recurrence of one layer, float32, shared by all heads of the layer.

    Parameters that the configuration does not use are None.

    Attributes:
      kernel: [K, K], the matrix W that maps value features to the inputs of the neurons.
      leak, threshold: scalars, as they are stored; the neurons use the result of
        `leak_and_threshold`.
      bias: [K], a bias that is added to the inputs of the neurons.
      sigma: a scalar, the weight of the segment's softmax attention; the recurrence has the weight
        1 - sigma.
      gate: a scalar, by which the output of the recurrence is multiplied.
    """

    kernel: Float[Array, "K K"] | None = None
    leak: Float[Array, ""] | None = None
    threshold: Float[Array, ""] | None = None
    bias: Float[Array, " K"] | None = None
    sigma: Float[Array, ""] | None = None
    gate: Float[Array, ""] | None = None


class RecurrentStates(NamedTuple):
    """The states of the segments of each source, with which queries are multiplied to get the
    output of the recurrence.

    Attributes:
      states: the states R, in the dtype of the keys.
      scale: float32, the factor gate / norm(K) of each output feature; None for factor 1.
      firing_rate: the fraction of entries of R above 0; None without neurons.
    """

    states: Float[Array, "M B H K K"]
    scale: Float[Array, "B H 1 K"] | None
    firing_rate: Float[Array, ""] | None


class NeuronMetrics(NamedTuple):
    """Metrics of the accumulate-and-fire neurons to log, float32; all fields are None if
    cross-attention has no neurons.

    Attributes:
      firing_rate: the fraction of entries of the states R above 0.
      leak, threshold: the parameters that the neurons use.
    """

    firing_rate: Float[Array, ""] | None = None
    leak: Float[Array, ""] | None = None
    threshold: Float[Array, ""] | None = None


def leak_and_threshold(
    parameters: RecurrenceParameters, config: CrossConfig
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the leak and the threshold of the neurons, computed from the stored parameters.

    If `config.raf_parameters` is "raw", the stored parameters are returned unchanged. Otherwise the
    leak is mapped to (0, 1), and the threshold to numbers above `config.smallest_threshold`.
    """
    leak, threshold = (x for x in (parameters.leak, parameters.threshold) if x is not None)
    if config.raf_parameters == "raw":
        return leak, threshold
    return jax.nn.sigmoid(leak), jax.nn.softplus(threshold) + config.smallest_threshold


def recurrence(
    keys: Float[Array, "M B H S K"],
    values: Float[Array, "M B H S K"],
    counts: Int[Array, " B"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
) -> RecurrentStates:
    """Returns the states R of all segments (equations 13 and 16), the factor of the recurrence's
    output, and the firing rate of the neurons.

    Sums and neurons are float32.

    Args:
      keys, values: keys and values of each segment; zeros where a source is padded.
      counts: the number of segments of each source.
      parameters: the layer's parameters.
      config: settings of cross-attention.
    """
    products = key_value_sums(keys, values, parameters, config)
    inputs = neuron_inputs(products, sum_segments(products), parameters, config)
    rate = None
    if config.use_raf:
        inputs, rate = accumulate_fire(inputs, counts, *leak_and_threshold(parameters, config))
    return RecurrentStates(inputs.astype(keys.dtype), output_scale(keys, parameters, config), rate)


def key_value_sums(
    keys: Float[Array, "*B S K"],
    values: Float[Array, "*B S K"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
) -> Float[Array, "*B K K"]:
    """Returns the product A_j = K_j^T V_j of each segment's keys and values, in float32.

    With neurons, the values are first multiplied by the matrix W, unless `config.clamp` is set: the
    sums of the products must then be clamped before they are multiplied by W, in `neuron_inputs`.

    Args:
      keys, values: the keys and values of each segment.
      parameters: the layer's parameters.
      config: settings of cross-attention.
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
    """Returns the inputs X_j = P_j W + bias of the neurons of every segment j, in float32; without
    neurons, returns P_j.

    P_j is the sum of the products A_i over all segments i other than j, or A_j itself if
    `config.kv_source` is "segment". If `config.clamp` is set, A_j and the sum over all segments are
    first clipped to this bound; otherwise, the products already contain W.

    Args:
      products: the products A_j of all segments, from `key_value_sums`.
      total: the sum of the products over all segments.
      parameters: the layer's parameters.
      config: settings of cross-attention.
    """
    if config.clamp:
        products, total = (jnp.clip(x, -config.clamp, config.clamp) for x in (products, total))
    x = products if config.kv_source == "segment" else _other_segments(products, total)
    if config.use_raf and config.clamp:
        x = matmul(x, parameters.kernel)
    if config.use_raf and parameters.bias is not None:
        x = x + jnp.expand_dims(parameters.bias, range(x.ndim - 1))
    return x


def output_scale(
    keys: Float[Array, "M B H S K"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
    squares: Float[Array, "B H 1 K"] | None = None,
) -> Float[Array, "B H 1 K"] | None:
    """Returns the factor by which each feature of the recurrence's output is multiplied, or None
    for the factor 1.

    The factor is the gate (1 without a gate), divided by the norm of the feature over all keys of
    the source if `config.norm` is "feature".

    Args:
      keys: the keys of each segment.
      parameters: the layer's parameters.
      config: settings of cross-attention.
      squares: the result of `key_squares`, if it is already known.
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
    """Returns, for each feature of the keys, the sum of its square over all source positions, in
    float32.
    """
    squares = jnp.square(keys.astype(jnp.float32))
    # The sum over positions is a matrix product with ones, which is faster on XLA's CPU backend.
    ones = jnp.ones((*keys.shape[:3], 1, keys.shape[3]), jnp.float32)
    return jnp.sum(jnp.matmul(ones, squares, precision="highest"), axis=0)


def inverse_norm(squares: Float[Array, "B H 1 K"], epsilon: float) -> Float[Array, "B H 1 K"]:
    """Returns 1 / sqrt(squares + epsilon^2) for each feature, or 1 where the root is 0.

    `squares` is the sum over positions of each squared key feature.
    """
    sums = squares + epsilon**2
    return jnp.where(sums > 0, jax.lax.rsqrt(jnp.where(sums > 0, sums, 1.0)), 1.0)


def sum_segments(x: Float[Array, "M *B"]) -> Float[Array, "*B"]:
    """Returns the sum of x over the segments, its first axis.

    The sum is computed as a product with ones, which is faster on CPUs (see `brt.ops.reductions`).
    """
    return jnp.tensordot(jnp.ones(x.shape[:1], x.dtype), x, axes=1, precision="highest")


@jax.custom_vjp
def matmul(x: Array, kernel: Array) -> Array:
    """Returns x @ kernel in x's dtype."""
    return jnp.einsum("...c,ce->...e", x, kernel.astype(x.dtype))


def _matmul_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return matmul(x, kernel), (x, kernel)


def _matmul_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    rows = tuple(range(x.ndim - 1))
    d_kernel = jax.lax.dot_general(
        x, gradient, ((rows, rows), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.einsum("...e,ce->...c", gradient, kernel.astype(gradient.dtype)), d_kernel


matmul.defvjp(_matmul_forward, _matmul_backward)


@jax.custom_vjp
def _other_segments(own: Array, total: Array) -> Array:
    """Returns P_j, the total without each segment."""
    return total[None] - own


def _other_segments_forward(own: Array, total: Array) -> tuple[Array, None]:
    return _other_segments(own, total), None


def _other_segments_backward(_: None, gradient: Array) -> tuple[Array, Array]:
    return -gradient, sum_segments(gradient)


_other_segments.defvjp(_other_segments_forward, _other_segments_backward)


@jax.custom_vjp
def _key_value_sums(keys: Array, values: Array) -> Array:
    return jnp.einsum("...sc,...se->...ce", keys, values, preferred_element_type=jnp.float32)


def _sums_forward(keys: Array, values: Array) -> tuple[Array, tuple[Array, Array]]:
    return _key_value_sums(keys, values), (keys, values)


def _sums_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    keys, values = residuals
    # The gradient is float32. It is converted, so that the products with the keys and the values
    # and their results have the dtype of the keys.
    gradient = gradient.astype(keys.dtype)
    return (
        jnp.einsum("...se,...ce->...sc", values, gradient),
        jnp.einsum("...sc,...ce->...se", keys, gradient),
    )


_key_value_sums.defvjp(_sums_forward, _sums_backward)
