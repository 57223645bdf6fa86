"""Products inside a scan whose weight gradients are computed once, after it.

The transpose of a scan adds x_t^T dy_t to a weight's gradient at every step: half of the
serial work, in products too small to run well. Nothing in the scan needs that sum. So the
scan's backward pass only hands out the pairs (x_t, dy_t), and one product of all steps
makes the gradient of them.

A `Tap` carries the pairs: zeros on the way forward, of which nothing is read; on the way
back its "gradient" is the pair.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dense import dense, dense_forward, input_gradient, weight_gradient


class Tap(NamedTuple):
    """Per step of the scan, where the pairs of a product come out: the scan's `xs`.

    Attributes:
      inputs: [N, *rows, *inputs].
      outputs: [N, *rows, *outputs].
    """

    inputs: Float[Array, "N ..."]
    outputs: Float[Array, "N ..."]


def tap(
    kernel: Float[Array, "..."], rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1
) -> Tap:
    """The taps of `dot` with `kernel` [*inputs, *outputs], for scan steps and rows."""
    return _tap(kernel, jnp.zeros((*rows, 0), dtype), inputs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _tap(kernel: Float[Array, "..."], like: Float[Array, "..."], inputs: int) -> Tap:
    rows = like.shape[:-1]
    return Tap(
        jnp.zeros((*rows, *kernel.shape[:inputs]), like.dtype),
        jnp.zeros((*rows, *kernel.shape[inputs:]), like.dtype),
    )


def _tap_forward(kernel: Array, like: Array, inputs: int) -> tuple[Tap, tuple[Array, Array]]:
    return _tap(kernel, like, inputs), (like, jnp.zeros((0,) * kernel.ndim, kernel.dtype))


def _tap_backward(inputs: int, saved: tuple[Array, Array], pair: Tap) -> tuple[Array, Array]:
    like, kernel = saved
    gradient = weight_gradient(*pair, inputs, kernel.ndim - inputs)
    return gradient.astype(kernel.dtype), like


_tap.defvjp(_tap_forward, _tap_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dot(x: Float[Array, "..."], kernel: Float[Array, "..."], tap: Tap, inputs: int = 1) -> Array:
    """`dense(x, kernel, inputs)`; the kernel's gradient goes into `tap`, of this step."""
    return dense(x, kernel, inputs)


def _dot_forward(
    x: Array, kernel: Array, tap: Tap, inputs: int
) -> tuple[Array, tuple[Array, Array]]:
    return dense_forward(x, kernel, inputs)


def _dot_backward(inputs: int, saved: tuple[Array, Array], dy: Array) -> tuple[Array, None, Tap]:
    x, kernel = saved
    return input_gradient(kernel, dy, inputs), None, Tap(x, dy)


dot.defvjp(_dot_forward, _dot_backward)
