"""Reference implementation of the gradient of a weight that all steps of a loop use: the sum of one
product for each step.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def weight_gradient(
    x: Float[Array, "N ..."],
    dy: Float[Array, "N ..."],
    inputs: int = 1,
    outputs: int = 1,
    *,
    as_bits: bool = False,
) -> Float[Array, "..."]:
    """Returns the gradient of a weight [*inputs, *outputs], summed over N steps, in float32.

    Args:
      x: [N, *rows, *inputs], the input that the weight was multiplied by in each step; *rows stands
        for any axes.
      dy: [N, *rows, *outputs], the gradient of the product in each step.
      inputs, outputs: the numbers of the weight's input axes and of its output axes.
      as_bits: ignored. True tells the TPU kernel that layers stored x as integers with the same
        bits, so that the kernel can read these integers.
    """
    rows = tuple(range(x.ndim - 1 - inputs))
    pairs = zip(x.astype(jnp.float32), dy.astype(jnp.float32), strict=True)
    products = [jnp.tensordot(*pair, axes=(rows, rows)) for pair in pairs]
    return jnp.sum(jnp.stack(products), axis=0)
