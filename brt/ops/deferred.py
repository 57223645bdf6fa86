"""Products inside a scan whose weight gradients are computed once, after it.

The transpose of a scan adds x_t^T dy_t to a weight's gradient at every step: half of the
serial work, in products too small to run well. Nothing in the scan needs that sum. So the
scan's backward pass only hands out the pairs (x_t, dy_t), and one product of all steps
makes the gradient of them.

A `Tap` carries the pairs: zeros on the way forward, of which nothing is read; on the way
back its "gradient" is the pair.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dense import weight_gradient


class Tap(NamedTuple):
    """Per step of the scan, where the pairs of a product come out: the scan's `xs`."""

    inputs: Float[Array, "N *B M"]
    outputs: Float[Array, "N *B D"]


def tap(kernel: Float[Array, "M D"], batch: tuple[int, ...], dtype: jnp.dtype) -> Tap:
    """The taps of `dot` with `kernel`, for scan steps and batch axes `batch`."""
    return _tap(kernel, jnp.zeros((*batch, 0), dtype))


@jax.custom_vjp
def _tap(kernel: Float[Array, "M D"], like: Float[Array, "..."]) -> Tap:
    batch = like.shape[:-1]
    return Tap(
        jnp.zeros((*batch, kernel.shape[0]), like.dtype),
        jnp.zeros((*batch, kernel.shape[1]), like.dtype),
    )


def _tap_forward(kernel: Array, like: Array) -> tuple[Tap, tuple[Array, Array]]:
    return _tap(kernel, like), (like, jnp.zeros((0,), kernel.dtype))


def _tap_backward(saved: tuple[Array, Array], pair: Tap) -> tuple[Array, Array]:
    like, kind = saved
    return weight_gradient(*pair).astype(kind.dtype), like


_tap.defvjp(_tap_forward, _tap_backward)


@jax.custom_vjp
def dot(x: Float[Array, "*B M"], kernel: Float[Array, "M D"], tap: Tap) -> Float[Array, "*B D"]:
    """x @ kernel in x's dtype; the kernel's gradient goes into `tap`, of this step."""
    return jnp.einsum("...m,md->...d", x, kernel.astype(x.dtype))


def _dot_forward(x: Array, kernel: Array, tap: Tap) -> tuple[Array, tuple[Array, Array]]:
    return dot(x, kernel, tap), (x, kernel)


def _dot_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, None, Tap]:
    x, kernel = saved
    dx = jnp.einsum("...d,md->...m", dy, kernel.astype(dy.dtype))
    return dx, None, Tap(x, dy)


dot.defvjp(_dot_forward, _dot_backward)
