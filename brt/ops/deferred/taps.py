"""Taps, which collect the arrays from which a scan's weight gradients are computed.

A tap has an array for the inputs x_t of a product y = x W at all steps t, and an array for the
gradients dy_t. The forward pass fills both with zeros, which nothing reads. In the backward pass,
the "gradients" of these arrays are the pairs (x_t, dy_t), and one product over all steps computes
the weight gradient, the sum of x_t^T dy_t. See the package's docstring.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.distributed.rules import shard_count
from brt.ops import dispatch
from brt.ops.weight_gradient import weight_gradient

Kernels = tuple[Float[Array, "..."], ...]


class Tap(NamedTuple):
    """Inputs and output gradients of one product with one or more kernels, for N steps of a scan.

    A tap is an argument `xs` of the scan, so each step receives its own part of the arrays.
    """

    # [N, *rows, *inputs], the inputs x_t, where `rows` are the axes of x that the product does not
    # sum over and `inputs` the others; if `dot_of_parts` multiplies its inputs separately, one
    # array for each of these inputs.
    inputs: Float[Array, "N ..."] | tuple[Float[Array, "N ..."], ...]
    # [N, *rows, *outputs] for each kernel [*inputs, *outputs], the gradients dy_t.
    outputs: tuple[Float[Array, "N ..."], ...]


class LayerTaps(NamedTuple):
    """The taps of the layers of a scan over layers, one tap with all steps for each layer.

    The arrays are not stacked over layers as well, because this would copy all of them once more.
    """

    layers: tuple[Tap, ...]


class _TapSpec(NamedTuple):
    """The arguments of `tap`, with the shapes and dtypes of the kernels."""

    kernels: tuple[jax.ShapeDtypeStruct, ...]
    rows: tuple[int, ...]
    dtype: jnp.dtype
    inputs: int
    parts: int
    as_bits: bool


def tap(
    kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1, *,
    parts: int = 0, as_bits: bool = False,
) -> Tap:  # fmt: skip
    """Returns a tap for all steps of a scan, for kernels [*inputs, *outputs].

    The backward pass computes the gradients of `kernels` from the tap, after the scan.

    Args:
      kernels: those that one call of `dots` multiplies with the same x, or the only one of a call
        of `dot_of_parts`.
      rows: the number N of scan steps, followed by the sizes of the axes of x that the products do
        not sum over.
      dtype: that of x and of the products.
      inputs: the number of axes that the products sum over.
      parts: the number of inputs of a `dot_of_parts` that multiplies its inputs separately, or 0.
      as_bits: True if layers stored x by `dispatch.output_residual`, as integers with x's bits. The
        Pallas kernel that computes the weight gradient then takes the integers, so that no copy
        converts them back to floating-point numbers.
    """
    shapes = tuple(jax.ShapeDtypeStruct(kernel.shape, kernel.dtype) for kernel in kernels)
    return _tap(kernels, _TapSpec(shapes, rows, dtype, inputs, parts, as_bits))


def layer_taps(
    kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1, *,
    of_parts: bool = False, as_bits: bool = False,
) -> LayerTaps | None:  # fmt: skip
    """Returns a tap for each layer of a scan over layers, inside of a scan over steps, or None.

    With taps, each step's pairs of inputs and output gradients are written once and read once.
    Without taps, a step writes and reads its float32 weight gradients and the sum of the gradients.
    The result is None if taps would write and read more bytes than a step does without taps.

    Args:
      kernels: the kernels of all layers, each [layers, *inputs, *outputs].
      rows: as in `tap`; the second size is the number of rows of the batch.
      dtype, inputs, as_bits: as in `tap`.
      of_parts: True if the taps are for `dot_of_parts`, whose number of parts is the size of the
        kernels' first input axis.
    """
    _, lanes, *others = rows
    width = math.prod(kernels[0].shape[1 : 1 + inputs])
    size = sum(math.prod(kernel.shape[1:]) for kernel in kernels)
    device_rows = lanes // shard_count("lanes", lanes) * math.prod(others)
    if 2 * device_rows * (width + size // width) * jnp.dtype(dtype).itemsize > 4 * size * 4:
        return None
    parts = kernels[0].shape[1] if of_parts else 0
    options = {"parts": parts if multiplies_separately(parts) else 0, "as_bits": as_bits}
    layers = zip(*map(jnp.unstack, kernels), strict=True)
    return LayerTaps(tuple(tap(layer, rows, dtype, inputs, **options) for layer in layers))


def stack_layers(taps: PyTree[Array]) -> PyTree[Array]:
    """Returns the tree `taps` of one step as the `xs` of a scan over layers.

    Each `LayerTaps` becomes one tap whose arrays have the layers on a new axis 0.
    """

    def stack(x: Any) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *x.layers) if _is_layers(x) else x

    return jax.tree.map(stack, taps, is_leaf=_is_layers)


def _is_layers(x: Any) -> bool:
    return isinstance(x, LayerTaps)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _tap(kernels: Kernels, spec: _TapSpec) -> Tap:
    inputs = spec.kernels[0].shape[: spec.inputs]

    def zeros(*shape: int) -> Array:
        return jnp.zeros((*spec.rows, *shape), spec.dtype)

    return Tap(
        tuple(zeros(*inputs[1:]) for _ in range(spec.parts)) if spec.parts else zeros(*inputs),
        tuple(zeros(*kernel.shape[spec.inputs :]) for kernel in spec.kernels),
    )


def _tap_forward(kernels: Kernels, spec: _TapSpec) -> tuple[Tap, None]:
    return _tap(kernels, spec), None


def _tap_backward(spec: _TapSpec, _: None, pairs: Tap) -> tuple[Kernels]:
    def kernel_gradient(kernel: jax.ShapeDtypeStruct, dy: Array) -> Array:
        outputs = len(kernel.shape) - spec.inputs
        product = partial(weight_gradient, dy=dy, outputs=outputs, as_bits=spec.as_bits)
        if spec.parts:
            gradient = jnp.stack([product(x, inputs=spec.inputs - 1) for x in pairs.inputs])
        else:
            gradient = product(pairs.inputs, inputs=spec.inputs)
        return gradient.astype(kernel.dtype)

    return (tuple(map(kernel_gradient, spec.kernels, pairs.outputs)),)


_tap.defvjp(_tap_forward, _tap_backward)


def multiplies_separately(parts: int) -> bool:
    """Returns True if `dot_of_parts` multiplies its inputs separately, not concatenated."""
    return parts > 1 and dispatch.policy().multiplies_separately
