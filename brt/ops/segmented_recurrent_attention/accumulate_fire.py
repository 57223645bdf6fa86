"""The recurrent accumulate-and-fire neuron (SRformer, section 3.3 and appendix A.2).

A neuron has a membrane potential U, which adds up its inputs X_j over the segments j of a source
sequence. Its output R is the amount by which the potential exceeds the threshold, relative to the
threshold:

    U_j = leak U_{j-1} + X_j
    Y_j = U_j / threshold - 1
    R_j = relu(Y_j)
    U_j <- U_j - threshold [Y_j > 0]

The last line is the reset: a neuron that has fired loses the threshold. The comparison Y_j > 0 has
no gradient. The backward pass is hand-written and saves, of all these arrays, only U.

A source has K x K neurons for each of its heads. In shapes, B is the number of sources, M of
segments, H of heads, and K of numbers of a head; *B stands for any leading axes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scalar = Float[Array, ""]


def accumulate(
    membrane: Float[Array, "*B K K"], x: Float[Array, "*B K K"], leak: Scalar, threshold: Scalar
) -> Float[Array, "*B K K"]:
    """Returns the membrane potential U_j at a segment j, before the reset of neurons that fire.

    Args:
      membrane: the potential U_{j-1} at the previous segment, before its reset; zeros for the first
        segment.
      x: the input X_j.
      leak, threshold: parameters of the neurons.
    """
    return leak * _reset(membrane, threshold) + x


def fire(membrane: Float[Array, "*B K K"], threshold: Scalar) -> Float[Array, "*B K K"]:
    """Returns the output R = relu(U / threshold - 1) of neurons.

    `membrane` is the potential U before the reset.
    """
    return jax.nn.relu(membrane / threshold - 1)


def accumulate_fire(
    inputs: Float[Array, "M B H K K"], counts: Int[Array, " B"], leak: Scalar, threshold: Scalar
) -> tuple[Float[Array, "M B H K K"], Scalar]:
    """Returns the outputs R of the neurons at every segment, in the dtype of the inputs, and the
    firing rate.

    The firing rate is the fraction of entries of R that are above 0, over the existing segments of
    a source, averaged over sources.

    Args:
      inputs: the inputs X of the neurons at all segments.
      counts: the number of existing segments of each source; the others are padding.
      leak, threshold: parameters of the neurons.
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
        """Returns the potential U of a segment twice, as the scan's carry and as an output.

        Args:
          membrane: the potential of the previous segment, before its reset.
          x: the input X of the segment.
        """
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
    """Returns the sum of a * b as a product, which is faster on CPUs (see
    `recurrence.sum_segments`).
    """
    return jnp.tensordot(a, b, axes=a.ndim, precision="highest")


def _backward(residuals: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    membranes, leak, threshold = residuals
    fired = _fires(membranes, threshold)
    direct = jnp.where(fired, gradient / threshold, 0)

    def add_segment(later: Array, direct: Array) -> tuple[Array, Array]:
        """Returns the gradient of a segment's potential U twice, as the scan's carry and as an
        output.

        Args:
          later: the gradient of the next segment's potential.
          direct: the part of the gradient of U that comes from this segment's output R.
        """
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
