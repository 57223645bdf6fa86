"""Reference implementation of RMS normalization of an input that a residual connection reads."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def residual_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns x / rms(x) * scale and x."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    y = wide / jnp.sqrt(mean + epsilon) * jnp.broadcast_to(scale, x.shape)
    return y.astype(x.dtype), x
