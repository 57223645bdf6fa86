"""RMS, L2 and layer normalization over the last axis, computed in float32.

RMS and L2 normalization have hand-written gradients. The forward pass saves the input or the result
and, for each vector, the factor by which the vector was multiplied.
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
    squares = sum_last(jnp.square(x.astype(jnp.float32)))
    # Rematerialized layers that save this number of each vector need not compute it again from all
    # of x.
    return dispatch.output_residual(jax.lax.rsqrt(weight * squares + epsilon))


def inverse_norm(x: Float[Array, "*B K"]) -> Float[Array, "*B"]:
    """Returns the factor by which `l2_normalize` multiplies each vector."""
    return _inverse(x, 1.0)[..., 0]


def _input_gradient(y: Array, inverse: Array, gradient: Array, weight: float) -> Array:
    # This is the gradient of x for y = x * inverse.
    dots = weight * sum_last(gradient * y)
    return (gradient - dots * y) * inverse


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float = EPSILON
) -> Float[Array, "*B D"]:
    """Returns x / rms(x) * scale (Zhang & Sennrich 2019); `epsilon` is added to the mean square."""
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
    """Returns (x - mean) / deviation * scale + bias (Ba et al. 2016)."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon)
    return add_shared(scale_shared(y, scale), bias).astype(x.dtype)


def half_squares(x: Float[Array, "*B K"]) -> Float[Array, "*B"]:
    return jnp.sum(x.astype(jnp.float32) ** 2, axis=-1) / 2


@jax.custom_vjp
def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Returns x / |x|."""
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
    """Returns x / |x| * scale.

    `scale` has the axes right before the last axis of x. Usually this is only the axis of heads, so
    each head has its own scale.
    """
    return _unit_forward(x, scale)[0]


def _unit_forward(x: Array, scale: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    inverse = _inverse(x, 1.0)
    y = x.astype(jnp.float32) * (inverse * _broadcast_scale(scale, x[..., 0])[..., None])
    return y.astype(x.dtype), (x, inverse, scale)


def _unit_backward(residuals: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, inverse, scale = residuals
    unit, gradient = x.astype(jnp.float32) * inverse, gradient.astype(jnp.float32)
    # The gradient of the scale, in float32, needs the same sums as the gradient of x.
    dots = sum_last(gradient * unit)
    dx = (gradient - dots * unit) * (inverse * _broadcast_scale(scale, dots[..., 0])[..., None])
    return dx.astype(x.dtype), sum_leading(dots[..., 0], x.ndim - 1 - scale.ndim)


scaled_unit.defvjp(_unit_forward, _unit_backward)
