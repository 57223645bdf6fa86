"""Depthwise convolution over a sequence: each channel has a kernel column of its own."""

from functools import reduce

import jax.numpy as jnp
from jaxtyping import Array, Float


def depthwise_convolution(
    x: Float[Array, "B T D"], kernel: Float[Array, "W D"]
) -> Float[Array, "B T D"]:
    """Returns y[t] = sum over w of kernel[w] x[t + w - (W - 1) / 2]; x is 0 outside, W is odd."""
    width, tokens = len(kernel), x.shape[1]
    half = width // 2
    padded = jnp.pad(x, ((0, 0), (half, half), (0, 0)))
    rows = kernel.astype(x.dtype)[:, None, None]
    # XLA's CPU backend takes many times longer for a grouped convolution than for W products.
    return reduce(jnp.add, (rows[w] * padded[:, w : w + tokens] for w in range(width)))
