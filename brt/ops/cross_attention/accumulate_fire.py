"""The recurrent accumulate-and-fire neuron (SRformer, section 3.3 and appendix A.2).

A neuron has a membrane potential U, which adds up its inputs X_j over the segments j of a source.
Its output R is the amount by which U exceeds the threshold, relative to the threshold:

    U_j = leak U_{j-1} + X_j
    Y_j = U_j / threshold - 1
    R_j = relu(Y_j)
    U_j <- U_j - threshold [Y_j > 0]

The last line is the reset of a neuron that has fired. The comparison Y_j > 0 has no gradient. The
hand-written backward pass saves only U. A source has K x K neurons for each of its heads. In
shapes, B is the number of sources, and M the number of segments.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scalar = Float[Array, ""]


def accumulate(
    membrane: Float[Array, "*B K K"], x: Float[Array, "*B K K"], leak: Scalar, threshold: Scalar
) -> Float[Array, "*B K K"]:
    """Returns U_j for the potential U_{j-1} (`membrane`), both before their resets."""
    return leak * _reset(membrane, threshold) + x


def fire(membrane: Float[Array, "*B K K"], threshold: Scalar) -> Float[Array, "*B K K"]:
    return jax.nn.relu(membrane / threshold - 1)


def accumulate_fire(
    inputs: Float[Array, "M B H K K"], counts: Int[Array, " B"], leak: Scalar, threshold: Scalar
) -> tuple[Float[Array, "M B H K K"], Scalar]:
    """Returns the outputs R at every segment, and the fraction of the outputs that is above 0.

    The fraction is computed over the existing segments (`counts`) of each source, and then averaged
    over the sources.
    """
    outputs = _accumulate_fire(inputs, leak, threshold)
    counted = jnp.arange(inputs.shape[0])[:, None] < counts[None]
    rates = jnp.mean(outputs > 0, axis=(2, 3, 4), dtype=jnp.float32)
    return outputs, jnp.mean(jnp.sum(rates * counted, axis=0) / counts)


def _fires(membrane: Array, threshold: Array) -> Array:
    return membrane / threshold - 1 > 0


def _reset(membrane: Array, threshold: Array) -> Array:
    return membrane - threshold * _fires(membrane, threshold)


def _membranes(inputs: Array, leak: Array, threshold: Array) -> Array:
    def add_segment(membrane: Array, x: Array) -> tuple[Array, Array]:
        membrane = accumulate(membrane, x, leak, threshold)
        return membrane, membrane

    return jax.lax.scan(add_segment, jnp.zeros_like(inputs[0]), inputs)[1]


@jax.custom_vjp
def _accumulate_fire(inputs: Array, leak: Array, threshold: Array) -> Array:
    return fire(_membranes(inputs, leak, threshold), threshold)


def _forward(inputs: Array, leak: Array, threshold: Array) -> tuple[Array, tuple]:
    membranes = _membranes(inputs, leak, threshold)
    return fire(membranes, threshold), (membranes, leak, threshold)


def _dot(a: Array, b: Array) -> Array:
    # On CPUs, this is faster than the sum of a * b (see `brt.ops.reductions`).
    return jnp.tensordot(a, b, axes=a.ndim, precision="highest")


def _backward(residuals: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    membranes, leak, threshold = residuals
    fired = _fires(membranes, threshold)
    direct = jnp.where(fired, gradient / threshold, 0)

    def add_segment(later: Array, direct: Array) -> tuple[Array, Array]:
        d_membrane = direct + leak * later
        return d_membrane, d_membrane

    # Gradients flow back from segment to segment, because the derivative of U_{j+1} with respect to
    # U_j is the leak. U_{j+1} also depends on the threshold, which the reset subtracts from U_j.
    _, d_inputs = jax.lax.scan(add_segment, jnp.zeros_like(direct[0]), direct, reverse=True)
    later, before = d_inputs[1:], _reset(membranes, threshold)[:-1]
    d_leak = _dot(later, before)
    d_threshold = -_dot(direct, membranes) / threshold
    d_threshold -= leak * _dot(later, fired[:-1].astype(later.dtype))
    return d_inputs, d_leak.astype(leak.dtype), d_threshold.astype(threshold.dtype)


_accumulate_fire.defvjp(_forward, _backward)
