"""Matrix products in a step of a scan whose weight gradients are computed once, after the scan.

The backward pass of a step only writes the product's input and output gradients to the step's entry
of a tap. The package's docstring explains the method.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.distributed.rules import constrain, partitioned
from brt.ops import dispatch
from brt.ops.block_products import shared_input_matmul, summed_matmul
from brt.ops.deferred.taps import Kernels, Tap, multiplies_separately
from brt.ops.dense import dense, dense_forward, input_gradient, weight_gradient
from brt.ops.layer_kernel import LayerKernel
from brt.ops.layout import transpose_copy


def dots(
    x: Float[Array, "..."], kernels: Sequence[Array | LayerKernel], tap: Tap | None,
    inputs: int = 1,
) -> tuple[Array, ...]:  # fmt: skip
    """Returns the products [*rows, *outputs] of x with several kernels (weights).

    With a tap, the backward pass computes no weight gradients. It writes x and the gradients of the
    products to the tap, from which the weight gradients are computed after the scan.

    Args:
      x: [*rows, *inputs], where `rows` stands for any number of axes.
      kernels: [*inputs, *outputs] each.
      tap: this step's entry of the tap, or None for ordinary weight gradients.
      inputs: the number of axes that the products sum over.
    """
    if tap is None:
        return tuple(dense(x, kernel, inputs) for kernel in kernels)
    return _dots(x, jax.lax.stop_gradient(tuple(kernels)), tap, inputs)


def dot(
    x: Float[Array, "..."], kernel: Array | LayerKernel, tap: Tap | None, inputs: int = 1
) -> Array:
    """Returns the product of x with one kernel, as in `dots`."""
    return dots(x, (kernel,), tap, inputs)[0]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dots(x: Array, kernels: Kernels, tap: Tap, inputs: int) -> tuple[Array, ...]:
    return _products(x, kernels, inputs)


def _dots_forward(
    x: Array, kernels: Kernels, tap: Tap, inputs: int
) -> tuple[tuple[Array, ...], tuple[Array, Kernels]]:
    products = _products(x, kernels, inputs)
    if _stores_transposes():
        kernels = tuple(_transpose_kernel(kernel, inputs) for kernel in kernels)
    return products, (x, kernels)


def _products(x: Array, kernels: Kernels, inputs: int) -> tuple[Array, ...]:
    *input_axes, outputs = kernels[0].shape
    alone = len(kernels) == 1 and len(input_axes) == inputs
    if alone and (inputs > 1 or input_axes[0] > outputs):
        return (summed_matmul((x,), kernels),)
    if inputs == 1:
        return shared_input_matmul(x, kernels)
    return tuple(dense_forward(x, kernel, inputs)[0] for kernel in kernels)


def _dots_backward(
    inputs: int, saved: tuple[Array, Kernels], gradients: tuple[Array, ...]
) -> tuple[Array, None, Tap]:
    x, kernels = saved
    return _input_gradient(kernels, gradients, inputs), None, Tap(x, gradients)


def _stores_transposes() -> bool:
    # For few rows, XLA's CPU backend takes twice as long for a product with a transposed kernel.
    # Outside the loop, the kernel is transposed once.
    return dispatch.policy().stores_transposes and not partitioned()


def _transpose_kernel(kernel: Array, inputs: int) -> Array:
    axes = range(kernel.ndim)
    return transpose_copy(kernel, *axes[inputs:], *axes[:inputs])


def _input_gradient(kernels: Kernels, gradients: tuple[Array, ...], inputs: int) -> Array:
    if _stores_transposes():
        pairs = zip(gradients, kernels, strict=True)
        first, *others = (dense_forward(dy, k, k.ndim - inputs)[0] for dy, k in pairs)
        return sum(others, first)
    if inputs == 1:
        return summed_matmul(gradients, kernels, transposed=True)
    if len(kernels) == 1 and kernels[0].ndim == inputs + 1:
        return shared_input_matmul(gradients[0], kernels, transposed=True)[0]
    pairs = zip(kernels, gradients, strict=True)
    first, *others = (input_gradient(kernel, dy, inputs) for kernel, dy in pairs)
    return sum(others, first)


_dots.defvjp(_dots_forward, _dots_backward)


def dot_of_parts(
    parts: Sequence[Array],
    kernel: Float[Array, "P ..."] | LayerKernel,
    tap: Tap | None,
    inputs: int,
) -> Array:
    """Returns the product [*rows, *outputs] of a kernel with the concatenation of P inputs.

    If separate products are faster on this backend, the inputs are not concatenated: input p is
    multiplied by kernel[p], and the products are added.

    Args:
      parts: [*rows, *features] each.
      kernel: [P, *features, *outputs]; kernel[p] belongs to input p.
      tap: as in `dots`.
      inputs: the number of axes that the product sums over, including the first axis of the kernel.
    """
    if not multiplies_separately(len(parts)):
        return dot(jnp.stack(parts, axis=-inputs), kernel, tap, inputs)
    if tap is not None:
        kernel = jax.lax.stop_gradient(kernel)
    return _joined(tuple(parts), kernel, tap, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _joined(
    parts: tuple[Array, ...], kernel: Float[Array, "P ..."], tap: Tap | None, inputs: int
) -> Array:
    return summed_matmul(parts, kernel, as_bits=True)


def _joined_forward(
    parts: tuple[Array, ...], kernel: Array, tap: Tap | None, inputs: int
) -> tuple[Array, tuple]:
    y = summed_matmul(parts, kernel, as_bits=True)
    return y, (parts, kernel, None if tap is None else ())


def _joined_backward(
    inputs: int, saved: tuple[tuple[Array, ...], Array, tuple[()] | None], gradient: Array
) -> tuple[tuple[Array, ...], Array | None, Tap | None]:
    parts, kernel, tapped = saved
    d_parts = shared_input_matmul(gradient, kernel, transposed=True)
    if tapped is not None:
        return d_parts, None, Tap(parts, (gradient,))
    outputs = kernel.ndim - inputs
    sums = [weight_gradient(part, gradient, inputs - 1, outputs) for part in parts]
    return d_parts, jnp.stack(sums).astype(kernel.dtype), None


_joined.defvjp(_joined_forward, _joined_backward)


def relu_mlp(
    x: Float[Array, "B *R D"], kernels: tuple[Array, Array], taps: tuple[Tap, Tap]
) -> Float[Array, "B *R D"]:
    """Returns relu(x V) W for kernels V and W, whose gradients are computed from their taps."""
    return _relu_mlp(x, jax.lax.stop_gradient(kernels), taps)


@jax.custom_vjp
def _relu_mlp(x: Array, kernels: tuple[Array, Array], taps: tuple[Tap, Tap]) -> Array:
    return _relu_mlp_forward(x, kernels, taps)[0]


def _relu_mlp_forward(
    x: Array, kernels: tuple[Array, Array], taps: tuple[Tap, Tap]
) -> tuple[Array, tuple]:
    hidden = _constrained(shared_input_matmul(x, kernels[:1], relu=True)[0])
    return summed_matmul((hidden,), kernels[1:], as_bits=True), (x, hidden, kernels)


def _relu_mlp_backward(saved: tuple, gradient: Array) -> tuple[Array, None, tuple[Tap, Tap]]:
    x, hidden, kernels = saved
    d_hidden = _constrained(
        shared_input_matmul(gradient, kernels[1:], transposed=True, where=hidden)[0]
    )
    d_x = summed_matmul((d_hidden,), kernels[:1], transposed=True)
    return d_x, None, (Tap(x, (d_hidden,)), Tap(hidden, (gradient,)))


def _constrained(hidden: Float[Array, "B *R F"]) -> Float[Array, "B *R F"]:
    return constrain(hidden, "lanes", *[None] * (hidden.ndim - 2), "mlp")


_relu_mlp.defvjp(_relu_mlp_forward, _relu_mlp_backward)
