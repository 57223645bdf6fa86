"""RMS, L2 and layer normalization, computed in float32.

RMS and L2 normalization have hand-written backward passes. These save the input or the result, and
one number per vector, the factor by which the vector was multiplied.

In shapes, D or K is the number of numbers of a vector, and *B stands for any leading axes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.reductions import add_shared, scale_shared, sum_last, sum_leading

EPSILON = 1e-6


def _inverse(
    x: Float[Array, "*B D"], weight: float, epsilon: float = EPSILON
) -> Float[Array, "*B 1"]:
    """Returns 1 / sqrt(weight * sum(x^2) + epsilon) over the last axis, in float32.

    The result is marked as a residual: rematerialized layers that save this number per vector need
    not read all of x again to compute the sum.
    """
    squares = sum_last(jnp.square(x.astype(jnp.float32)))
    return dispatch.output_residual(jax.lax.rsqrt(weight * squares + epsilon))


def _input_gradient(y: Array, inverse: Array, gradient: Array, weight: float) -> Array:
    """Returns the gradient of x from the gradient of y = x * inverse."""
    along = weight * sum_last(gradient * y)
    return (gradient - along * y) * inverse


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float = EPSILON
) -> Float[Array, "*B D"]:
    """Returns x / rms(x) * scale over the last axis, in x's dtype (Zhang & Sennrich 2019).

    `epsilon` is added to the mean square, whose root is rms(x).
    """
    return rms_norm_forward(x, scale, epsilon)[0]


def _broadcast_scale(scale: Float[Array, "*D"], like: Array) -> Array:
    return scale.reshape((1,) * (like.ndim - scale.ndim) + scale.shape)


def rms_norm_forward(
    x: Array, scale: Array, epsilon: float
) -> tuple[Array, tuple[Array, Array, Array]]:
    inverse = _inverse(x, 1 / x.shape[-1], epsilon)
    y = x.astype(jnp.float32) * inverse * _broadcast_scale(scale, x)
    return y.astype(x.dtype), (x, scale, inverse)


def _rms_backward(
    epsilon: float, residuals: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, scale, inverse = residuals
    y, gradient = x.astype(jnp.float32) * inverse, gradient.astype(jnp.float32)
    dx = _input_gradient(y, inverse, gradient * _broadcast_scale(scale, x), 1 / x.shape[-1])
    return dx.astype(x.dtype), sum_leading(gradient * y, x.ndim - 1)


rms_norm.defvjp(rms_norm_forward, _rms_backward)


def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"],
    epsilon: float,
) -> Float[Array, "*B D"]:
    """Returns (x - mean) / deviation * scale + bias over the last axis, in x's dtype (Ba et al.
    2016).

    `epsilon` is added to the variance.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon)
    return add_shared(scale_shared(y, scale), bias).astype(x.dtype)


def inverse_norms(x: Float[Array, "*B K"]) -> Float[Array, "*B"]:
    """Returns the float32 factor 1 / |x| of each vector, by which `l2_normalize` multiplies the
    vector.
    """
    return _inverse(x, 1.0)[..., 0]


@jax.custom_vjp
def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Returns x / |x| over the last axis, in x's dtype."""
    return _l2_forward(x)[0]


def _l2_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = _inverse(x, 1.0)
    y = (x.astype(jnp.float32) * inverse).astype(x.dtype)
    return y, (y, inverse)


def _l2_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array]:
    y, inverse = residuals
    dx = _input_gradient(y.astype(jnp.float32), inverse, gradient.astype(jnp.float32), 1.0)
    return (dx.astype(y.dtype),)


l2_normalize.defvjp(_l2_forward, _l2_backward)


@jax.custom_vjp
def scaled_unit(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Array:
    """Returns x / |x| * scale in x's dtype, where the norm is over the last axis.

    The axes of `scale` are those axes of x that stand right before the last one, usually only the
    axis of heads; each head then has a norm of its own. The backward pass computes the scale's
    gradient, in float32, from sums that the gradient of x needs anyway.
    """
    return _unit_forward(x, scale)[0]


def _unit_forward(x: Array, scale: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    inverse = _inverse(x, 1.0)
    y = x.astype(jnp.float32) * (inverse * _broadcast_scale(scale, x[..., 0])[..., None])
    return y.astype(x.dtype), (x, inverse, scale)


def _unit_backward(residuals: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, inverse, scale = residuals
    unit, gradient = x.astype(jnp.float32) * inverse, gradient.astype(jnp.float32)
    along = sum_last(gradient * unit)
    dx = (gradient - along * unit) * (inverse * _broadcast_scale(scale, along[..., 0])[..., None])
    return dx.astype(x.dtype), sum_leading(along[..., 0], x.ndim - 1 - scale.ndim)


scaled_unit.defvjp(_unit_forward, _unit_backward)
