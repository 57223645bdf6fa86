"""The states R of every segment, which summarize the rest of the source (section 3.2).

States depend on the source alone, so a source has one set of states for all targets. Gradients are
hand-written where autodiff would be slow on CPUs or would mix dtypes. No axes are merged, because
sources and heads may be sharded.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.segmented_recurrent_attention.accumulate_fire import accumulate_fire
from brt.ops.segmented_recurrent_attention.config import CrossConfig


class RecurrenceParameters(NamedTuple):
    """Float32 parameters of one layer, shared by its heads; None for those that are not used.

    Attributes:
      kernel: W [K, K], maps value features to the inputs of the neurons.
      leak, threshold: [], as they are stored; `leak_and_threshold` bounds them if configured.
      bias: [K], added after W.
      sigma: [], the share of the segment's softmax attention.
      gate: [], factor of the recurrence.
    """

    kernel: Float[Array, "K K"] | None = None
    leak: Float[Array, ""] | None = None
    threshold: Float[Array, ""] | None = None
    bias: Float[Array, " K"] | None = None
    sigma: Float[Array, ""] | None = None
    gate: Float[Array, ""] | None = None


class RecurrentStates(NamedTuple):
    """The part of the attention that is not the segment's softmax.

    Attributes:
      states: R, in the dtype of the keys.
      scale: gate / norm(K) for each output feature, float32, or None.
      firing_rate: the share of R above 0; None without neurons.
    """

    states: Float[Array, "M B H K K"]
    scale: Float[Array, "B H 1 K"] | None
    firing_rate: Float[Array, ""] | None


class NeuronMetrics(NamedTuple):
    """Float32 numbers to log; None without neurons."""

    firing_rate: Float[Array, ""] | None = None
    leak: Float[Array, ""] | None = None
    threshold: Float[Array, ""] | None = None


def leak_and_threshold(
    parameters: RecurrenceParameters, config: CrossConfig
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns leak and threshold as the neurons use them."""
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
    """Computes equations 13 and 16 for all segments at once; sums and neurons are float32.

    Args:
      keys, values: zeros where a source is padded.
      counts: the number of segments of each source.
      parameters: the layer's parameters.
      config: settings of cross-attention.
    """
    own = key_value_sums(keys, values, parameters, config)
    inputs = neuron_inputs(own, sum_segments(own), parameters, config)
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
    """Returns A_j = K_j^T V_j in float32.

    W is already applied to the values, unless the sums are clamped before W.
    """
    if config.use_raf and not config.clamp:
        values = _matmul(values, parameters.kernel)
    return _key_value_sums(keys, values)


def neuron_inputs(
    own: Float[Array, "M *B K K"],
    total: Float[Array, "*B K K"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
) -> Float[Array, "M *B K K"]:
    """Returns X_j = P_j W from the sums A_j and their total, or P_j itself without neurons."""
    if config.clamp:
        own, total = (jnp.clip(x, -config.clamp, config.clamp) for x in (own, total))
    x = own if config.kv_source == "segment" else _other_segments(own, total)
    if config.use_raf and config.clamp:
        x = _matmul(x, parameters.kernel)
    if config.use_raf and parameters.bias is not None:
        x = x + jnp.expand_dims(parameters.bias, range(x.ndim - 1))
    return x


def output_scale(
    keys: Float[Array, "M B H S K"],
    parameters: RecurrenceParameters,
    config: CrossConfig,
    squares: Float[Array, "B H 1 K"] | None = None,
) -> Float[Array, "B H 1 K"] | None:
    """Returns the factor of O_R: the gate times the inverse norm of the keys, or None for neither.

    Args:
      keys: the keys.
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
    """Returns the sum of k^2 over positions for each feature, in float32."""
    squares = jnp.square(keys.astype(jnp.float32))
    # A product with ones, as in `sum_segments`.
    ones = jnp.ones((*keys.shape[:3], 1, keys.shape[3]), jnp.float32)
    return jnp.sum(jnp.matmul(ones, squares, precision="highest"), axis=0)


def inverse_norm(squares: Float[Array, "B H 1 K"], epsilon: float) -> Float[Array, "B H 1 K"]:
    """Returns 1 / sqrt(sum over positions of k^2 + epsilon^2) of each feature, or 1 instead of 1 /
    0.
    """
    sums = squares + epsilon**2
    return jnp.where(sums > 0, jax.lax.rsqrt(jnp.where(sums > 0, sums, 1.0)), 1.0)


def sum_segments(x: Float[Array, "M *B"]) -> Float[Array, "*B"]:
    """Returns the sum over the first axis as a product with ones, as in `brt.ops.reductions`."""
    return jnp.tensordot(jnp.ones(x.shape[:1], x.dtype), x, axes=1, precision="highest")


@jax.custom_vjp
def _matmul(x: Array, kernel: Array) -> Array:
    """Returns x @ kernel in x's dtype."""
    return jnp.einsum("...c,ce->...e", x, kernel.astype(x.dtype))


def _matmul_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(x, kernel), (x, kernel)


def _matmul_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    rows = tuple(range(x.ndim - 1))
    d_kernel = jax.lax.dot_general(
        x, gradient, ((rows, rows), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.einsum("...e,ce->...c", gradient, kernel.astype(gradient.dtype)), d_kernel


_matmul.defvjp(_matmul_forward, _matmul_backward)


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
    gradient = gradient.astype(keys.dtype)  # The products would otherwise mix dtypes.
    return (
        jnp.einsum("...se,...ce->...sc", values, gradient),
        jnp.einsum("...sc,...ce->...se", keys, gradient),
    )


_key_value_sums.defvjp(_sums_forward, _sums_backward)
