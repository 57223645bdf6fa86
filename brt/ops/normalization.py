"""RMS and L2 normalisation, computed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-6


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"]) -> Float[Array, "*B D"]:
    """x / rms(x) * scale over the last axis, in x's dtype (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + EPSILON)
    shape = (1,) * (x.ndim - 1) + scale.shape
    return (x32 * inverse * scale.reshape(shape)).astype(x.dtype)


def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """x / |x| over the last axis, in x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True) + EPSILON)
    return (x32 * inverse).astype(x.dtype)
