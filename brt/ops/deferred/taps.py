"""Taps, which collect what a scan's weight gradients are computed from.

The weight gradient of a product y = x W in a scan is the sum of x_t^T dy_t over all steps t. A tap
has an array for all x_t and an array for all dy_t. The forward pass fills both with zeros, which
nothing reads. In the backward pass, the "gradients" of these arrays are the pairs (x_t, dy_t), and
one product over all steps computes the weight gradient from them.
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
    """Inputs and output gradients of one x with several kernels, for N steps of a scan (the scan's
    `xs`).

    Attributes:
      inputs: [N, *rows, *inputs]; for `dot_of_parts`, one array for each part.
      outputs: [N, *rows, *outputs] for each kernel.
    """

    inputs: Float[Array, "N ..."] | tuple[Float[Array, "N ..."], ...]
    outputs: tuple[Float[Array, "N ..."], ...]


class LayerTaps(NamedTuple):
    """The taps of several layers, one for each layer. Stacking them by layer and then by step would
    copy everything twice.

    Attributes:
      layers: the tap of each layer, for all steps.
    """

    layers: tuple[Tap, ...]


class _Like(NamedTuple):
    """The form of the products.

    Attributes:
      inputs: the number of axes that the products sum over.
      layers: True if the first axis of the kernels is the layer.
      parts: the number of inputs of `dot_of_parts`; 0 for a single input.
      as_bits: True if rematerialized layers save x as bits.
    """

    inputs: int
    layers: bool = False
    parts: int = 0
    as_bits: bool = False


def tap(kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1) -> Tap:
    """Returns a tap for all steps of a scan in which `dots` uses kernels [*inputs, *outputs].

    The weight gradients that the tap collects become the gradients of `kernels`.

    Args:
      kernels: the kernels.
      rows: the numbers of scan steps, of lanes (rows of the batch), and of rows of a lane.
      dtype: the dtype of x and of the products.
      inputs: the number of axes that the products sum over.
    """
    return _taps(kernels, jnp.zeros((*rows, 0), dtype), _Like(inputs)).layers[0]


def layer_taps(
    kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1, *,
    joins: bool = False, as_bits: bool = False,
) -> LayerTaps | None:  # fmt: skip
    """Returns the taps of layers whose kernels have the layers on axis 0, or None.

    The result is None if taps would move more memory than adding gradients up: a step writes and
    reads its pairs, or otherwise its float32 gradient and the sum.

    Args:
      kernels: the kernels [layers, *inputs, *outputs].
      rows: the numbers of scan steps, of lanes (rows of the batch), and of rows of a lane.
      dtype: the dtype of x and of the products.
      inputs: the number of axes that the products sum over.
      joins: True if the taps are for `dot_of_parts`.
      as_bits: True if x is a `dispatch.output_residual` in the form of bits.
    """
    _, lanes, *others = rows
    width = math.prod(kernels[0].shape[1 : 1 + inputs])
    size = sum(math.prod(kernel.shape[1:]) for kernel in kernels)
    device_rows = lanes // shard_count("lanes", lanes) * math.prod(others)
    if 2 * device_rows * (width + size // width) * jnp.dtype(dtype).itemsize > 4 * size * 4:
        return None
    parts = kernels[0].shape[1] if joins else 0
    like = _Like(inputs, True, parts if multiplies_separately(parts) else 0, as_bits)
    return _taps(kernels, jnp.zeros((*rows, 0), dtype), like)


def stack_layers(taps: PyTree[Array]) -> PyTree[Array]:
    """Returns the taps of one step, with each `LayerTaps` stacked on axis 0 as a scan over layers
    takes them.
    """

    def stack(x: Any) -> Any:
        """Returns a `LayerTaps` as one tap with the layers on axis 0, and any other x unchanged."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *x.layers) if _is_layers(x) else x

    return jax.tree.map(stack, taps, is_leaf=_is_layers)


def _is_layers(x: Any) -> bool:
    return isinstance(x, LayerTaps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _taps(kernels: Kernels, none: Float[Array, "..."], like: _Like) -> LayerTaps:
    """Returns arrays of zeros; `none` has the shape [*rows, 0] and the dtype of the pairs."""
    rows = none.shape[:-1]
    shapes = [kernel.shape[like.layers :] for kernel in kernels]
    inputs = shapes[0][: like.inputs]

    def zeros(*shape: int) -> Array:
        """Returns zeros for all rows."""
        return jnp.zeros((*rows, *shape), none.dtype)

    one = Tap(
        tuple(zeros(*inputs[1:]) for _ in range(like.parts)) if like.parts else zeros(*inputs),
        tuple(zeros(*shape[like.inputs :]) for shape in shapes),
    )
    return LayerTaps((one,) * (len(kernels[0]) if like.layers else 1))


def _taps_forward(
    kernels: Kernels, none: Array, like: _Like
) -> tuple[LayerTaps, tuple[Array, Kernels]]:
    kinds = tuple(jnp.zeros((0,) * kernel.ndim, kernel.dtype) for kernel in kernels)
    return _taps(kernels, none, like), (none, kinds)


def _taps_backward(
    like: _Like, saved: tuple[Array, Kernels], pairs: LayerTaps
) -> tuple[Kernels, Array]:
    none, kinds = saved

    def layer_gradient(pair: Tap, i: int, outputs: int) -> Array:
        """Returns the gradient of the i-th kernel of one layer."""
        product = partial(
            weight_gradient, dy=pair.outputs[i], outputs=outputs, as_bits=like.as_bits
        )
        if not like.parts:
            return product(pair.inputs, inputs=like.inputs)
        gradients = (product(x, inputs=like.inputs - 1) for x in pair.inputs)
        return jnp.stack(list(gradients))

    def kernel_gradient(i: int, kind: Array) -> Array:
        """Returns the gradient of the i-th kernel, whose dtype and number of axes `kind` has."""
        outputs = kind.ndim - like.layers - like.inputs
        gradients = [layer_gradient(pair, i, outputs).astype(kind.dtype) for pair in pairs.layers]
        return jnp.stack(gradients) if like.layers else gradients[0]

    return tuple(kernel_gradient(i, kind) for i, kind in enumerate(kinds)), none


_taps.defvjp(_taps_forward, _taps_backward)


def multiplies_separately(parts: int) -> bool:
    """Returns True if this many inputs of a product are multiplied one by one instead of
    concatenated.
    """
    return parts > 1 and dispatch.policy().multiplies_separately
