"""Products inside a scan whose weight gradients are computed once, after it.

The transpose of a scan adds x_t^T dy_t to a weight's gradient at every step: half of the
serial work, in products too small to run well. Nothing in the scan needs that sum. So the
scan's backward pass only hands out the pairs (x_t, dy_t), and one product of all steps
makes the gradient of them.

A `Tap` carries the pairs: zeros on the way forward, of which nothing is read; on the way
back its "gradient" is the pair. One tap is for one use of its kernels in a step: of two, the
pairs would be added up. Uses without a tap have gradients of their own, as ever.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.distributed.rules import count
from brt.ops.dense import dense, dense_forward, input_gradient, weight_gradient, weight_gradients

Kernels = tuple[Float[Array, "..."], ...]


class Tap(NamedTuple):
    """Per step of the scan, where the pairs of products of one x come out: the scan's `xs`.

    Attributes:
      inputs: [N, *rows, *inputs].
      outputs: of each kernel, [N, *rows, *outputs].
    """

    inputs: Float[Array, "N ..."]
    outputs: tuple[Float[Array, "N ..."], ...]


def tap(kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1) -> Tap:
    """The taps of `dots` with kernels [*inputs, *outputs], for scan steps and rows."""
    return _tap(kernels, jnp.zeros((*rows, 0), dtype), inputs, 0)


def stacked_tap(
    kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1
) -> Tap | None:
    """That of layers, whose kernels have them on axis 0 and whose taps have them on axis 1.

    None where that moves more than adding up: a step writes and reads its pairs, or else its
    float32 gradient, and the sum besides.

    Args:
      rows: scan steps, lanes, and what there is of each lane.
    """
    steps, *others = rows
    layers, width = len(kernels[0]), math.prod(kernels[0].shape[1 : 1 + inputs])
    size = sum(math.prod(kernel.shape[1:]) for kernel in kernels)
    here = math.prod(others) // count("lanes", others[0])
    if 2 * here * (width + size // width) * jnp.dtype(dtype).itemsize > 4 * size * 4:
        return None
    return _tap(kernels, jnp.zeros((steps, layers, *others, 0), dtype), inputs, 1)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _tap(kernels: Kernels, like: Float[Array, "..."], inputs: int, layers: int) -> Tap:
    """`layers`: how many axes of kernels are none of a product's: 0, or 1."""
    rows, cut = like.shape[:-1], layers + inputs
    return Tap(
        jnp.zeros((*rows, *kernels[0].shape[layers:cut]), like.dtype),
        tuple(jnp.zeros((*rows, *kernel.shape[cut:]), like.dtype) for kernel in kernels),
    )


def _tap_forward(
    kernels: Kernels, like: Array, inputs: int, layers: int
) -> tuple[Tap, tuple[Array, Kernels]]:
    kinds = tuple(jnp.zeros((0,) * kernel.ndim, kernel.dtype) for kernel in kernels)
    return _tap(kernels, like, inputs, layers), (like, kinds)


def _tap_backward(
    inputs: int, layers: int, saved: tuple[Array, Kernels], pair: Tap
) -> tuple[Kernels, Array]:
    like, kinds = saved

    def gradient(dy: Array, kind: Array) -> Array:
        if layers:
            return weight_gradients(pair.inputs, dy, inputs).astype(kind.dtype)
        return weight_gradient(pair.inputs, dy, inputs, kind.ndim - inputs).astype(kind.dtype)

    return tuple(map(gradient, pair.outputs, kinds)), like


_tap.defvjp(_tap_forward, _tap_backward)


def dots(
    x: Float[Array, "..."], kernels: Sequence[Array], tap: Tap | None, inputs: int = 1
) -> tuple[Array, ...]:
    """`dense(x, kernel, inputs)` of each kernel, whose gradients go into `tap`, of this step."""
    if tap is None:
        return tuple(dense(x, kernel, inputs) for kernel in kernels)
    return _dots(x, jax.lax.stop_gradient(tuple(kernels)), tap, inputs)


def dot(x: Float[Array, "..."], kernel: Array, tap: Tap | None, inputs: int = 1) -> Array:
    """`dots` with one kernel."""
    return dots(x, (kernel,), tap, inputs)[0]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dots(x: Array, kernels: Kernels, tap: Tap, inputs: int) -> tuple[Array, ...]:
    return tuple(dense(x, kernel, inputs) for kernel in kernels)


def _dots_forward(
    x: Array, kernels: Kernels, tap: Tap, inputs: int
) -> tuple[tuple[Array, ...], tuple[Array, Kernels]]:
    return tuple(dense_forward(x, kernel, inputs)[0] for kernel in kernels), (x, kernels)


def _dots_backward(
    inputs: int, saved: tuple[Array, Kernels], gradients: tuple[Array, ...]
) -> tuple[Array, None, Tap]:
    x, kernels = saved
    parts = [
        input_gradient(kernel, dy, inputs) for kernel, dy in zip(kernels, gradients, strict=True)
    ]
    return sum(parts[1:], parts[0]), None, Tap(x, gradients)


_dots.defvjp(_dots_forward, _dots_backward)
