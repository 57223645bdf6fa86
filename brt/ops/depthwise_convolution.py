"""Depthwise convolution over a sequence: each channel is convolved separately.

In shapes, B is the number of sequences, T of tokens of a sequence, D of channels, and W the width
of the kernel in tokens.
"""

from functools import reduce

import jax.numpy as jnp
from jaxtyping import Array, Float


def depthwise_convolution(
    x: Float[Array, "B T D"], kernel: Float[Array, "W D"]
) -> Float[Array, "B T D"]:
    """Returns x convolved along T, each channel with its own column of the kernel, in x's dtype.

    The result y[t] is the sum over w of kernel[w] x[t + w - (W - 1) / 2], with zeros outside of x.
    The width W must be odd. The function adds W products instead of calling a grouped convolution,
    for which XLA's CPU backend takes many times longer.
    """
    width, tokens = len(kernel), x.shape[1]
    half = width // 2
    padded = jnp.pad(x, ((0, 0), (half, half), (0, 0)))
    rows = kernel.astype(x.dtype)[:, None, None]
    return reduce(jnp.add, (rows[w] * padded[:, w : w + tokens] for w in range(width)))
