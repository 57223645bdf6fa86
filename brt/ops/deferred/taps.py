"""Where the pairs of a scan's steps come out, and the sums that are made of them."""

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
    """Per step of the scan, where the pairs of products of one x come out: the scan's `xs`.

    Attributes:
      inputs: [N, *rows, *inputs]; of `joined` products each part.
      outputs: of each kernel, [N, *rows, *outputs].
    """

    inputs: Float[Array, "N ..."] | tuple[Float[Array, "N ..."], ...]
    outputs: tuple[Float[Array, "N ..."], ...]


class LayerTaps(NamedTuple):
    """Those of layers, each its own: what is stacked by layer, and then by step, is moved twice."""

    layers: tuple[Tap, ...]


class _Like(NamedTuple):
    """What products are like: how many axes they sum over, and how many parts are `joined`."""

    inputs: int
    layers: bool = False  # whether the first axis of kernels is theirs
    parts: int = 0
    as_bits: bool = False  # how x is kept where layers are computed again


def tap(kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1) -> Tap:
    """The taps of `dots` with kernels [*inputs, *outputs], for scan steps and rows."""
    return _taps(kernels, jnp.zeros((*rows, 0), dtype), _Like(inputs)).layers[0]


def layer_taps(
    kernels: Kernels, rows: tuple[int, ...], dtype: jnp.dtype, inputs: int = 1, *,
    joins: bool = False, as_bits: bool = False,
) -> LayerTaps | None:  # fmt: skip
    """Those of layers, whose kernels have them on axis 0.

    None where that moves more than adding up: a step writes and reads its pairs, or else its
    float32 gradient, and the sum besides.

    Args:
      rows: scan steps, lanes, and what there is of each lane.
      joins: of the kernel of a `joined` product.
      as_bits: x is `dispatch.output_residual`, as bits.
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
    """Taps of one step, layers on axis 0 as a scan over them takes them."""

    def stacked(x: Any) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *x.layers) if _is_layers(x) else x

    return jax.tree.map(stacked, taps, is_leaf=_is_layers)


def _is_layers(x: Any) -> bool:
    return isinstance(x, LayerTaps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _taps(kernels: Kernels, none: Float[Array, "..."], like: _Like) -> LayerTaps:
    """`none`: [*rows, 0], of the pairs' dtype."""
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
    """Whether products of so many parts read each where it is."""
    return parts > 1 and dispatch.policy().multiplies_separately
