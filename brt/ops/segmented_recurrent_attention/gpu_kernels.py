"""Bodies of the Triton kernels of the segmented recurrence; `pallas_gpu` describes the algorithm.

A program of a kernel sees the arrays of one head of a source. In the launch parameters, `rows` is
the number of source positions of a tile, or of rows of the states in the kernel of the potentials;
`columns` is the number of columns of the states.

In shapes, M is the number of segments, S of source positions of a segment, and K of numbers of a
head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from brt.ops.gpu import LaunchShape, dot_float32

_MATRIX_ROWS = 64  # The matrix units take this number of rows of a product's first factor.


class NeuronTileInputs(NamedTuple):
    """Inputs of the forward kernel, or their block specs."""

    # [M, S, K] each. The values are already multiplied by the neurons' matrix W.
    keys: Any
    values: Any
    # [3], float32: leak, threshold, and 1 divided by the threshold.
    neuron: Any
    # int32 [1], the number of existing segments.
    counts: Any
    # [K], float32, the bias of the neurons' inputs, or None.
    bias: Any


class NeuronTileOutputs(NamedTuple):
    """Outputs of the forward kernel, or their block specs; all but the states are float32."""

    # [M, K, K], the states R of all segments.
    states: Any
    # [K], for each feature the sum of the squared keys over all positions.
    squares: Any
    # [K], for each column of the states the number of entries above 0 in existing segments.
    fired: Any
    # [M, K, K], the membrane potentials U before their reset; None if no gradients are needed.
    potentials: Any


class PotentialTileInputs(NamedTuple):
    """Inputs of the backward kernel of the potentials, or their block specs."""

    # [M, K, K], as in `NeuronTileOutputs`.
    potentials: Any
    # [M, K, K], the gradient of the states.
    gradient: Any
    # [3], as in `NeuronTileInputs`.
    neuron: Any


class PotentialTileGradients(NamedTuple):
    """Outputs of the backward kernel of the potentials, or their block specs."""

    # [M, K, K], the gradients of the neurons' inputs X.
    own: Any
    # [K, K], float32, the sum of `own` over the segments.
    total: Any
    # [K] each, float32, for each row of the states its part of the gradient.
    leak: Any
    threshold: Any


class ProductTileInputs(NamedTuple):
    """Inputs of the backward kernel of the products of a segment, or their block specs."""

    # [S, K] each. The values are already multiplied by the matrix W.
    keys: Any
    values: Any
    # [K, K], the gradient of the segment's X.
    own: Any
    # [K, K], float32, the sum of the gradients of X over the segments; None if X is the product of
    # the segment itself.
    total: Any
    # [K], the gradient of `NeuronTileOutputs.squares`.
    squares: Any


def segmented_recurrence_forward(
    inputs: NeuronTileInputs, outputs: NeuronTileOutputs, *, launch: LaunchShape, remaining: bool
) -> None:
    """Writes some columns of the states of all segments, and their sums, for a head of a source.

    If `remaining`, the input X_j of the neurons is the sum of the products of all segments other
    than j; otherwise, it is the product A_j itself.
    """
    segments, size, width = inputs.keys.shape
    tiles, neuron = size // launch.rows, inputs.neuron
    columns = _tile_slice(pl.program_id(0), launch.columns)

    def add_product(i: Any, product: Array) -> Array:
        # Tile i is counted over all segments of the source.
        j, rows = _place(i, tiles, launch.rows)
        return product + dot_float32(inputs.keys[j, rows].T, inputs.values[j, rows, columns])

    def add_tile(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        j, rows = _place(i, tiles, launch.rows)
        squares = jnp.square(inputs.keys[j, rows, columns].astype(jnp.float32))
        return add_product(i, carry[0]), carry[1] + jnp.sum(squares, axis=0)

    def fire_segment(j: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # The carry has the potentials after the reset and, for each column, the number of states
        # above 0 in existing segments so far.
        membrane, fired = carry
        own = _loop(j * tiles, tiles, add_product, zeros)
        x = total - own if remaining else own
        if inputs.bias is not None:
            x = x + inputs.bias[columns][None]
        membrane = neuron[0] * membrane + x
        above = membrane * neuron[2] - 1
        outputs.states[j, :, columns] = jnp.maximum(above, 0).astype(outputs.states.dtype)
        if outputs.potentials is not None:
            outputs.potentials[j, :, columns] = membrane
        counted = (above > 0) & (j < inputs.counts[0])
        fired = fired + jnp.sum(counted.astype(jnp.float32), axis=0)
        return _reset(membrane, neuron), fired

    zeros, row = jnp.zeros((width, launch.columns), jnp.float32), jnp.zeros(launch.columns)
    total, squares = jax.lax.fori_loop(0, segments * tiles, add_tile, (zeros, row))
    _, fired = jax.lax.fori_loop(0, segments, fire_segment, (zeros, row))
    outputs.squares[columns] = squares
    outputs.fired[columns] = fired


def segmented_recurrence_potentials(
    inputs: PotentialTileInputs, results: PotentialTileGradients, *, launch: LaunchShape
) -> None:
    """Writes the gradients of some rows of the neurons' inputs of all segments, and their sums.

    The comparison of a potential with the threshold has no gradient.
    """
    (segments, _, width), neuron = inputs.potentials.shape, inputs.neuron
    rows = _tile_slice(pl.program_id(0), launch.rows)

    def segment_backward(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        # The carry has the gradient of the potential of the segment that was processed last, and
        # the sums so far of the gradients of the neurons' inputs, of the leak and of the threshold.
        j, (later, total, leak, threshold) = segments - 1 - i, carry
        potential = inputs.potentials[j, rows]
        above = potential * neuron[2] - 1 > 0
        gradient = inputs.gradient[j, rows].astype(jnp.float32)
        direct = jnp.where(above, gradient * neuron[2], 0.0)
        leak = leak + later * _reset(potential, neuron)
        threshold = threshold - (
            direct * potential * neuron[2] + neuron[0] * jnp.where(above, later, 0.0)
        )
        later = direct + neuron[0] * later
        results.own[j, rows] = later.astype(results.own.dtype)
        return later, total + later, leak, threshold

    start = (jnp.zeros((launch.rows, width), jnp.float32),) * 4
    _, total, leak, threshold = jax.lax.fori_loop(0, segments, segment_backward, start)
    results.total[rows] = total
    results.leak[rows] = jnp.sum(leak, axis=1)
    results.threshold[rows] = jnp.sum(threshold, axis=1)


def segmented_recurrence_products(
    inputs: ProductTileInputs, d_keys: Any, d_values: Any, *, launch: LaunchShape
) -> None:
    """Writes the gradients [S, K] of a segment's keys and of its values' products with W."""
    dtype = inputs.keys.dtype
    own = inputs.own[...]
    if inputs.total is not None:
        own = inputs.total[...] - own
    own, squares = own.astype(dtype), inputs.squares[...][None]

    def tile_backward(i: Any, _: None) -> None:
        rows = _tile_slice(i, launch.rows)
        keys = inputs.keys[rows]
        products = _few_rows_times(inputs.values[rows], own.T)
        d_keys[rows] = (products + 2 * keys.astype(jnp.float32) * squares).astype(dtype)
        d_values[rows] = _few_rows_times(keys, own).astype(dtype)

    _loop(0, inputs.keys.shape[0] // launch.rows, tile_backward, None)


def _loop(first: Any, count: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    if count == 1:  # no loop for one tile
        return body(first, start)
    return jax.lax.fori_loop(first, first + count, body, start)


def _tile_slice(index: Any, size: int) -> Any:
    return pl.ds(index * size, size)


def _place(i: Any, tiles: int, rows: int) -> tuple[Any, Any]:
    """Returns the segment and the positions of tile i, if a segment has `tiles` tiles."""
    if tiles == 1:
        return i, pl.ds(0, rows)
    return jax.lax.div(i, tiles), _tile_slice(jax.lax.rem(i, tiles), rows)


def _few_rows_times(a: Array, b: Array) -> Array:
    # The matrix units of an H100 take 64 rows of the first factor at a time. With fewer rows, the
    # product a b is therefore computed from the transposed factors.
    return dot_float32(a, b) if a.shape[0] >= _MATRIX_ROWS else dot_float32(b.T, a.T).T


def _reset(membrane: Array, neuron: Any) -> Array:
    return membrane - jnp.where(membrane * neuron[2] - 1 > 0, neuron[1], 0.0)
