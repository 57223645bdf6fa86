"""Taps, from which the pairs of a scan's steps come out, and the weight gradients computed from
them.
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
    """Accumulators for the products of one x with several kernels, one for each step of a scan (the
    scan's `xs`).

    Attributes:
      inputs: [N, *rows, *inputs]; for `joined` products, one array for each part.
      outputs: [N, *rows, *outputs] for each kernel.
    """

    inputs: Float[Array, "N ..."] | tuple[Float[Array, "N ..."], ...]
    outputs: tuple[Float[Array, "N ..."], ...]


class LayerTaps(NamedTuple):
    """The taps of several layers, one for each layer. Stacking them by layer and then by step would
    copy everything twice.
    """

    layers: tuple[Tap, ...]


class _Like(NamedTuple):
    """The form of the products: the number of axes that they sum over, and the number of parts that
    are `joined`.
    """

    inputs: int
    layers: bool = False  # True if the first axis of the kernels is the layers.
    parts: int = 0
    as_bits: bool = False  # True stores x as bits, which rematerialised layers need not recompute.


def tap(kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1) -> Tap:
    """Returns a tap for `dots` with kernels [*inputs, *outputs].

    Args:
      rows: scan steps, lanes, and rows of a lane.
    """
    return _taps(kernels, jnp.zeros((*rows, 0), dtype), _Like(inputs)).layers[0]


def layer_taps(
    kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1, *,
    joins: bool = False, as_bits: bool = False,
) -> LayerTaps | None:  # fmt: skip
    """Returns the taps of layers whose kernels have the layers on axis 0.

    Returns None if this would move more memory than adding gradients up: a step writes and reads
    its pairs, or otherwise its float32 gradient and the sum.

    Args:
      rows: scan steps, lanes, and rows of a lane.
      joins: number of parts of a `joined` product.
      as_bits: True if x is a `dispatch.output_residual` in the form of bits.
    """
    _, lanes, *others = rows
    width = math.prod(kernels[0].shape[1 : 1 + inputs])
    size = sum(math.prod(kernel.shape[1:]) for kernel in kernels)
    here = lanes // shard_count("lanes", lanes) * math.prod(others)
    if 2 * here * (width + size // width) * jnp.dtype(dtype).itemsize > 4 * size * 4:
        return None
    parts = kernels[0].shape[1] if joins else 0
    like = _Like(inputs, True, parts if apart(parts) else 0, as_bits)
    return _taps(kernels, jnp.zeros((*rows, 0), dtype), like)


def of_step(taps: PyTree[Array]) -> PyTree[Array]:
    """Returns the taps of one step, with the layers on axis 0 as a scan over layers takes them."""

    def stacked(x: Any) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *x.layers) if _is_layers(x) else x

    return jax.tree.map(stacked, taps, is_leaf=_is_layers)


def _is_layers(x: Any) -> bool:
    return isinstance(x, LayerTaps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _taps(kernels: Kernels, none: Float[Array, "..."], like: _Like) -> LayerTaps:
    """Returns arrays of zeros; `none` has the shape [*rows, 0] and the dtype of the pairs."""
    rows = none.shape[:-1]
    shapes = [kernel.shape[like.layers :] for kernel in kernels]
    inputs = shapes[0][: like.inputs]

    def zeros(*shape: int) -> Array:
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

    def of_layer(pair: Tap, i: int, outputs: int) -> Array:
        summed = partial(weight_gradient, dy=pair.outputs[i], outputs=outputs, as_bits=like.as_bits)
        if not like.parts:
            return summed(pair.inputs, inputs=like.inputs)
        found = (summed(x, inputs=like.inputs - 1) for x in pair.inputs)
        return jnp.stack(list(found))

    def gradient(i: int, kind: Array) -> Array:
        outputs = kind.ndim - like.layers - like.inputs
        found = [of_layer(pair, i, outputs).astype(kind.dtype) for pair in pairs.layers]
        return jnp.stack(found) if like.layers else found[0]

    return tuple(gradient(i, kind) for i, kind in enumerate(kinds)), none


_taps.defvjp(_taps_forward, _taps_backward)


def apart(parts: int) -> bool:
    """Returns True if the parts are multiplied separately instead of being concatenated."""
    return parts > 1 and dispatch.policy().multiplies_separately
