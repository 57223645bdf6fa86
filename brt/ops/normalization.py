"""RMS and L2 normalisation, computed in float32."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.reductions import scale_last

EPSILON = 1e-6


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _normalize(x: Float[Array, "..."], weight: float) -> Float[Array, "..."]:
    """x / sqrt(weight * sum(x^2) + epsilon) over the last axis, float32."""
    return _forward(x, weight)[0]


def _forward(x: Array, weight: float) -> tuple[Array, tuple[Array, Array]]:
    x = x.astype(jnp.float32)
    squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(weight * squares + EPSILON)
    return x * inverse, (x * inverse, inverse)


def _backward(weight: float, saved: tuple[Array, Array], gradient: Array) -> tuple[Array]:
    y, inverse = saved
    along = weight * jnp.sum(gradient * y, axis=-1, keepdims=True)
    return ((gradient - along * y) * inverse,)


_normalize.defvjp(_forward, _backward)


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"]) -> Float[Array, "*B D"]:
    """x / rms(x) * scale over the last axis, in x's dtype (Zhang & Sennrich 2019)."""
    normed = _normalize(x.astype(jnp.float32), 1 / x.shape[-1])
    return scale_last(normed, scale).astype(x.dtype)


def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """x / |x| over the last axis, in x's dtype."""
    return _normalize(x.astype(jnp.float32), 1.0).astype(x.dtype)
