"""The recurrent accumulate-and-fire neuron (section 3.3, appendix A.2).

    U_j = leak U_{j-1} + X_j;  Y_j = U_j / threshold - 1;  R_j = relu(Y_j)
    U_j <- U_j - threshold [Y_j > 0]

The comparison has no gradient. The backward pass is hand-written and saves only U.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scalar = Float[Array, ""]


def accumulate(
    membrane: Float[Array, "*B K K"], x: Float[Array, "*B K K"], leak: Scalar, threshold: Scalar
) -> Float[Array, "*B K K"]:
    """Returns U of the next segment from U of the previous one, before its reset; U begins as
    zeros.
    """
    return leak * _reset(membrane, threshold) + x


def fire(membrane: Float[Array, "*B K K"], threshold: Scalar) -> Float[Array, "*B K K"]:
    """Returns R of U; R consists of real numbers, not spikes."""
    return jax.nn.relu(membrane / threshold - 1)


def accumulate_fire(
    inputs: Float[Array, "M B H K K"], counts: Int[Array, " B"], leak: Scalar, threshold: Scalar
) -> tuple[Float[Array, "M B H K K"], Scalar]:
    """Returns R of every segment in the dtype of the inputs (float32), and the firing rate.

    The rate is the share of R above 0 in the existing segments, averaged over sources.
    """
    outputs = _accumulate_fire(inputs, leak, threshold)
    counted = jnp.arange(inputs.shape[0])[:, None] < counts[None]  # [M, B]
    rates = jnp.mean(outputs > 0, axis=(2, 3, 4), dtype=jnp.float32)
    return outputs, jnp.mean(jnp.sum(rates * counted, axis=0) / counts)


def _fires(membrane: Array, threshold: Array) -> Array:
    return membrane / threshold - 1 > 0


def _reset(membrane: Array, threshold: Array) -> Array:
    return membrane - threshold * _fires(membrane, threshold)


def _membranes(inputs: Array, leak: Array, threshold: Array) -> Array:
    def body(membrane: Array, x: Array) -> tuple[Array, Array]:
        membrane = accumulate(membrane, x, leak, threshold)
        return membrane, membrane

    return jax.lax.scan(body, jnp.zeros_like(inputs[0]), inputs)[1]


@jax.custom_vjp
def _accumulate_fire(inputs: Array, leak: Array, threshold: Array) -> Array:
    return fire(_membranes(inputs, leak, threshold), threshold)


def _forward(inputs: Array, leak: Array, threshold: Array) -> tuple[Array, tuple]:
    membranes = _membranes(inputs, leak, threshold)
    return fire(membranes, threshold), (membranes, leak, threshold)


def _dot(a: Array, b: Array) -> Array:
    """Returns the sum of a * b as a product, which is faster on CPUs (see
    `recurrence.sum_segments`).
    """
    return jnp.tensordot(a, b, axes=a.ndim, precision="highest")


def _backward(residuals: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    membranes, leak, threshold = residuals
    fired = _fires(membranes, threshold)
    direct = jnp.where(fired, gradient / threshold, 0)

    def body(later: Array, direct: Array) -> tuple[Array, Array]:
        d_membrane = direct + leak * later
        return d_membrane, d_membrane

    # dU_{j+1} / dU_j is the leak. U_{j+1} also depends on what the reset subtracted from U_j.
    _, d_inputs = jax.lax.scan(body, jnp.zeros_like(direct[0]), direct, reverse=True)
    later, before = d_inputs[1:], _reset(membranes, threshold)[:-1]
    d_leak = _dot(later, before)
    d_threshold = -_dot(direct, membranes) / threshold
    d_threshold -= leak * _dot(later, fired[:-1].astype(later.dtype))
    return d_inputs, d_leak.astype(leak.dtype), d_threshold.astype(threshold.dtype)


_accumulate_fire.defvjp(_forward, _backward)
