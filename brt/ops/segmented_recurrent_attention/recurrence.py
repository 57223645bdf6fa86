"""The states R of every segment: what the rest of the source means to it (section 3.2).

They depend on the source alone, so that a document has one set of them, whoever reads it.
The gradients are written out where autodiff would be slow on CPUs, or would mix dtypes. No
axis is merged with another: sources and heads may be spread over devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import CrossAttention
from brt.config.seq2seq import SMALLEST_THRESHOLD
from brt.ops.segmented_recurrent_attention.accumulate_fire import accumulate_fire


class Parameters(NamedTuple):
    """What one layer learns, shared by its heads; what it does not use is None. Float32.

    Attributes:
      kernel: W [K, K], from the features of P's values to those of the neurons' inputs.
      leak, threshold: [], as stored: `effective` bounds them where that is asked for.
      bias: [K], added behind W.
      sigma: [], the share of the segment's softmax attention.
      gate: [], what the recurrence is multiplied by.
    """

    kernel: Float[Array, "K K"] | None = None
    leak: Float[Array, ""] | None = None
    threshold: Float[Array, ""] | None = None
    bias: Float[Array, " K"] | None = None
    sigma: Float[Array, ""] | None = None
    gate: Float[Array, ""] | None = None


class Recurrence(NamedTuple):
    """What queries read beside their segment.

    Attributes:
      states: R, in the dtype of the keys.
      scale: gate / norm(K), float32, on the feature that comes out; or None.
      firing_rate: share of R above 0; None without neurons.
    """

    states: Float[Array, "M B H K K"]
    scale: Float[Array, "B H 1 K"] | None
    firing_rate: Float[Array, ""] | None


class Aux(NamedTuple):
    """What to log; None where there are no neurons. Float32."""

    firing_rate: Float[Array, ""] | None = None
    leak: Float[Array, ""] | None = None
    threshold: Float[Array, ""] | None = None


def effective(
    parameters: Parameters, config: CrossAttention
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Leak and threshold as the neurons use them."""
    leak, threshold = (x for x in (parameters.leak, parameters.threshold) if x is not None)
    if config.raf_parameters == "raw":
        return leak, threshold
    return jax.nn.sigmoid(leak), jax.nn.softplus(threshold) + SMALLEST_THRESHOLD


def recurrence(
    keys: Float[Array, "M B H S K"],
    values: Float[Array, "M B H S K"],
    counts: Int[Array, " B"],
    parameters: Parameters,
    config: CrossAttention,
) -> Recurrence:
    """Equations 13 and 16 for all segments at once; sums and neurons in float32.

    Args:
      keys, values: zeros where a source is padded.
    """
    own = own_sums(keys, values, parameters, config)
    inputs = neuron_inputs(own, sum_segments(own), parameters, config)
    rate = None
    if config.use_raf:
        inputs, rate = accumulate_fire(inputs, counts, *effective(parameters, config))
    return Recurrence(inputs.astype(keys.dtype), output_scale(keys, parameters, config), rate)


def own_sums(
    keys: Float[Array, "*B S K"],
    values: Float[Array, "*B S K"],
    parameters: Parameters,
    config: CrossAttention,
) -> Float[Array, "*B K K"]:
    """A_j = K_j^T V_j, float32; behind W already, unless a clamp comes between.

    K^T (V W) is (K^T V) W for k d^2 products instead of m d^3.
    """
    if config.use_raf and not config.clamp:
        values = _times(values, parameters.kernel)
    return _key_value_sums(keys, values)


def neuron_inputs(
    own: Float[Array, "M *B K K"],
    total: Float[Array, "*B K K"],
    parameters: Parameters,
    config: CrossAttention,
) -> Float[Array, "M *B K K"]:
    """X_j = P_j W from A_j and their sum; P_j itself where there are no neurons."""
    if config.clamp:
        own, total = (jnp.clip(x, -config.clamp, config.clamp) for x in (own, total))
    x = own if config.kv_source == "segment" else _remaining(own, total)
    if config.use_raf and config.clamp:
        x = _times(x, parameters.kernel)
    if config.use_raf and parameters.bias is not None:
        x = x + jnp.expand_dims(parameters.bias, range(x.ndim - 1))
    return x


def output_scale(
    keys: Float[Array, "M B H S K"],
    parameters: Parameters,
    config: CrossAttention,
    squares: Float[Array, "B H 1 K"] | None = None,
) -> Float[Array, "B H 1 K"] | None:
    """What O_R is multiplied by: the gate, by the inverse norm of the keys; None: neither.

    Args:
      squares: `key_squares`, where they are known.
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
    """The sum over positions of k^2, of each feature; float32."""
    squares = jnp.square(keys.astype(jnp.float32))
    ones = jnp.ones((*keys.shape[:3], 1, keys.shape[3]), jnp.float32)  # as in `sum_segments`
    return jnp.sum(jnp.matmul(ones, squares, precision="highest"), axis=0)


def inverse_norm(squares: Float[Array, "B H 1 K"], epsilon: float) -> Float[Array, "B H 1 K"]:
    """1 / sqrt(sum over positions of k^2 + epsilon^2), of each feature; 1 where that is 1 / 0."""
    sums = squares + epsilon**2
    return jnp.where(sums > 0, jax.lax.rsqrt(jnp.where(sums > 0, sums, 1.0)), 1.0)


def sum_segments(x: Float[Array, "M *B"]) -> Float[Array, "*B"]:
    """The sum over the first axis, as a product with ones: see ops/reductions.py."""
    return jnp.tensordot(jnp.ones(x.shape[:1], x.dtype), x, axes=1, precision="highest")


@jax.custom_vjp
def _times(x: Array, kernel: Array) -> Array:
    """x @ kernel in x's dtype."""
    return jnp.einsum("...c,ce->...e", x, kernel.astype(x.dtype))


def _times_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _times(x, kernel), (x, kernel)


def _times_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    rows = tuple(range(x.ndim - 1))
    d_kernel = jax.lax.dot_general(
        x, gradient, ((rows, rows), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.einsum("...e,ce->...c", gradient, kernel.astype(gradient.dtype)), d_kernel


_times.defvjp(_times_forward, _times_backward)


@jax.custom_vjp
def _remaining(own: Array, total: Array) -> Array:
    """P_j."""
    return total[None] - own


def _remaining_forward(own: Array, total: Array) -> tuple[Array, None]:
    return _remaining(own, total), None


def _remaining_backward(_: None, gradient: Array) -> tuple[Array, Array]:
    return -gradient, sum_segments(gradient)


_remaining.defvjp(_remaining_forward, _remaining_backward)


@jax.custom_vjp
def _key_value_sums(keys: Array, values: Array) -> Array:
    return jnp.einsum("...sc,...se->...ce", keys, values, preferred_element_type=jnp.float32)


def _sums_forward(keys: Array, values: Array) -> tuple[Array, tuple[Array, Array]]:
    return _key_value_sums(keys, values), (keys, values)


def _sums_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    keys, values = residuals
    gradient = gradient.astype(keys.dtype)  # else the products mix dtypes
    return (
        jnp.einsum("...se,...ce->...sc", values, gradient),
        jnp.einsum("...sc,...ce->...se", keys, gradient),
    )


_key_value_sums.defvjp(_sums_forward, _sums_backward)
