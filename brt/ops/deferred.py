"""Matrix products inside a scan whose weight gradients are computed once, after the scan.

For a product y = x W, the backward pass of a scan computes two products at every step t: the
gradient of x_t, and x_t^T dy_t, which it adds to the gradient of the weight W. The second product
is too small to run efficiently, and no other step needs it. Here, the backward scan therefore only
returns the pairs (x_t, dy_t), and one product over all steps computes the weight's gradient.

A `Tap` carries the pairs out of the scan. In the forward pass, a tap consists of zeros that nothing
reads; in the backward pass, the "gradient" of the tap at step t is the pair (x_t, dy_t). Each use
of a kernel in a step needs a tap of its own, because JAX would add up the pairs of two uses.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.distributed.rules import partitioned
from brt.ops import dispatch
from brt.ops.dense import LayerKernel, dense, dense_forward, input_gradient, weight_gradient
from brt.ops.layout import transpose_copy


class Tap(NamedTuple):
    """The inputs and the output gradients of a product, for N steps of a scan."""

    inputs: Float[Array, "N ..."]  # [N, *rows, *inputs]
    outputs: Float[Array, "N ..."]  # [N, *rows, *outputs]


class _Spec(NamedTuple):
    kernel: jax.ShapeDtypeStruct
    rows: tuple[int, ...]
    dtype: jnp.dtype
    inputs: int


def tap(
    kernel: Float[Array, "..."], rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1
) -> Tap:
    """Returns a tap for a kernel that multiplies x [*rows, *inputs] in every step of a scan.

    The scan takes the tap as an `xs`, and the gradient of `kernel` is computed from the gradient of
    the tap.

    Args:
      kernel: [*inputs, *outputs].
      rows: the number N of steps, followed by the sizes of the axes of x over which the product
        does not sum.
      dtype: the dtype of x and of the product.
      inputs: the number of axes that the product sums over.
    """
    shape = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
    return _tap(kernel, _Spec(shape, rows, dtype, inputs))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _tap(kernel: Array, spec: _Spec) -> Tap:
    shape = spec.kernel.shape
    parts = shape[: spec.inputs], shape[spec.inputs :]
    return Tap(*(jnp.zeros((*spec.rows, *part), spec.dtype) for part in parts))


def _tap_backward(spec: _Spec, _: None, pairs: Tap) -> tuple[Array]:
    outputs = len(spec.kernel.shape) - spec.inputs
    return (weight_gradient(*pairs, spec.inputs, outputs).astype(spec.kernel.dtype),)


_tap.defvjp(lambda kernel, spec: (_tap(kernel, spec), None), _tap_backward)


def dot(
    x: Float[Array, "..."], kernel: Array | LayerKernel, tap: Tap | None, inputs: int = 1
) -> Array:
    """Returns the product [*rows, *outputs] of x [*rows, *inputs] with a kernel.

    `tap` is this step's slice of a `Tap` that the scan takes as an `xs`. The kernel's gradient is
    then computed after the scan. If `tap` is None, the gradient is computed in each step, as usual.
    """
    if tap is None:
        return dense(x, kernel, inputs)
    return _dot(x, jax.lax.stop_gradient(kernel), tap, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dot(x: Array, kernel: Array, tap: Tap, inputs: int) -> Array:
    return dense_forward(x, kernel, inputs)[0]


def _dot_forward(
    x: Array, kernel: Array, tap: Tap, inputs: int
) -> tuple[Array, tuple[Array, Array]]:
    y = dense_forward(x, kernel, inputs)[0]
    if _stores_transposes():
        axes = range(kernel.ndim)
        kernel = transpose_copy(kernel, *axes[inputs:], *axes[:inputs])
    return y, (x, kernel)


def _dot_backward(
    inputs: int, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, None, Tap]:
    x, kernel = saved
    if _stores_transposes():
        d_x = dense_forward(gradient, kernel, kernel.ndim - inputs)[0]
    else:
        d_x = input_gradient(kernel, gradient, inputs)
    return d_x, None, Tap(x, gradient)


_dot.defvjp(_dot_forward, _dot_backward)


def _stores_transposes() -> bool:
    # For few rows, XLA's CPU backend takes twice as long for a product with a transposed kernel. If
    # the result is True, the kernel is therefore transposed once, before the backward scan.
    return dispatch.policy().stores_transposes and not partitioned()
