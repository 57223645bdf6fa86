"""RMS, L2 and layer normalisation, computed in float32.

The backward passes of the first two are written out: they keep the input and one number per
vector.
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
    """1 / sqrt(weight * sum(x^2) + epsilon) over the last axis, float32; one number, which is
    kept, spares a pass over all of x where layers are computed again."""
    squares = sum_last(jnp.square(x.astype(jnp.float32)))
    return dispatch.kept(jax.lax.rsqrt(weight * squares + epsilon))


def _input_gradient(y: Array, inverse: Array, gradient: Array, weight: float) -> Array:
    """Gradient of x, given that of y = x * inverse."""
    along = weight * sum_last(gradient * y)
    return (gradient - along * y) * inverse


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float = EPSILON
) -> Float[Array, "*B D"]:
    """x / rms(x) * scale over the last axis, in x's dtype (Zhang & Sennrich 2019)."""
    return _rms_forward(x, scale, epsilon)[0]


def _along_last(scale: Float[Array, "*D"], like: Array) -> Array:
    return scale.reshape((1,) * (like.ndim - scale.ndim) + scale.shape)


def _rms_forward(
    x: Array, scale: Array, epsilon: float
) -> tuple[Array, tuple[Array, Array, Array]]:
    inverse = _inverse(x, 1 / x.shape[-1], epsilon)
    y = x.astype(jnp.float32) * inverse * _along_last(scale, x)
    return y.astype(x.dtype), (x, scale, inverse)


def _rms_backward(
    epsilon: float, saved: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, scale, inverse = saved
    y, gradient = x.astype(jnp.float32) * inverse, gradient.astype(jnp.float32)
    dx = _input_gradient(y, inverse, gradient * _along_last(scale, x), 1 / x.shape[-1])
    return dx.astype(x.dtype), sum_leading(gradient * y, x.ndim - 1)


rms_norm.defvjp(_rms_forward, _rms_backward)


def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"],
    epsilon: float,
) -> Float[Array, "*B D"]:
    """(x - mean) / deviation * scale + bias over the last axis, in x's dtype (Ba et al. 2016)."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon)
    return add_shared(scale_shared(y, scale), bias).astype(x.dtype)


@jax.custom_vjp
def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """x / |x| over the last axis, in x's dtype."""
    return _l2_forward(x)[0]


def _l2_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = _inverse(x, 1.0)
    y = (x.astype(jnp.float32) * inverse).astype(x.dtype)
    return y, (y, inverse)


def _l2_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array]:
    y, inverse = saved
    dx = _input_gradient(y.astype(jnp.float32), inverse, gradient.astype(jnp.float32), 1.0)
    return (dx.astype(y.dtype),)


l2_normalize.defvjp(_l2_forward, _l2_backward)


@jax.custom_vjp
def scaled_unit(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Array:
    """x / |x| * scale over the last axis, in x's dtype; before it are the scale's own axes, heads.

    The scale's gradient is a sum of what that of x needs anyway, and stays in float32.
    """
    return _unit_forward(x, scale)[0]


def _unit_forward(x: Array, scale: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    inverse = _inverse(x, 1.0)
    y = x.astype(jnp.float32) * (inverse * _along_last(scale, x[..., 0])[..., None])
    return y.astype(x.dtype), (x, inverse, scale)


def _unit_backward(saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, inverse, scale = saved
    unit, gradient = x.astype(jnp.float32) * inverse, gradient.astype(jnp.float32)
    along = sum_last(gradient * unit)
    dx = (gradient - along * unit) * (inverse * _along_last(scale, along[..., 0])[..., None])
    return dx.astype(x.dtype), sum_leading(along[..., 0], x.ndim - 1 - scale.ndim)


scaled_unit.defvjp(_unit_forward, _unit_backward)
