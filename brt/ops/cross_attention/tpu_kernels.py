"""Bodies of the TPU kernels of the recurrence, for one source and a group of heads.

The module `pallas_tpu` describes the algorithm. Segment j of the source has the product A_j =
K_j^T V_j W of its keys, its values and the neurons' matrix W. Accumulate-and-fire neurons add up
their inputs, which are sums of such products, from segment to segment in a membrane potential U_j.
A potential above the threshold fires: the state R_j of the segment is U_j / threshold - 1, and the
threshold is subtracted from the potential (the reset).

In all shapes, M is the number of segments, S the number of source positions of a segment, and K the
size of a head. P is the total width of the heads of a group, 128 on TPUs. The matrices K x K of
these heads lie side by side as one matrix K x P.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops.tpu import NN, NT, TN, dot_float32, unrolled_loop


class NeuronKernelSettings(NamedTuple):
    """Static settings of the kernels."""

    # K, the size of a head.
    width: int
    # P, the total size of the heads of a group.
    wide: int
    # True if the input of the neurons at segment j is the sum of the products A_i = K_i^T V_i W of
    # all other segments i. False if the input is A_j.
    remaining: bool
    interpret: bool | pltpu.InterpretParams


class NeuronKernelInputs(NamedTuple):
    """Inputs of a step of the grid, or their block specs."""

    # [M, S, P] each: M segments of S positions, and heads of the total width P.
    keys: Any
    values: Any
    # [P, P], a block-diagonal matrix with W for each head.
    kernel: Any
    # [M, K, P], the gradient of the states R; None in the forward pass.
    states: Any = None
    # [1, P], the gradient of `NeuronKernelOutputs.squares`; None in the forward pass.
    squares: Any = None


class NeuronKernelOutputs(NamedTuple):
    """Outputs of a step of the grid, or their block specs."""

    # [M, K, P], the states R of all segments.
    states: Any
    # [1, P], float32. For each feature, this is the sum of the squared keys over all positions.
    squares: Any
    # [1, P], float32. For each column of the states, this is the number of entries above 0 in the
    # segments that exist.
    fired: Any


class NeuronKernelGradients(NamedTuple):
    """Gradients that the steps of the backward kernel compute, or their block specs."""

    # [M, S, P] each; every step overwrites them.
    keys: Any
    values: Any
    # [K, P], the gradient of W for each head. This field and the next are float32 sums over all
    # sources, to which each step adds its contribution.
    kernel: Any
    # [2, P], the gradients of leak and threshold. The caller adds up the columns, each of which has
    # only a part of a gradient.
    neuron: Any


def forward_kernel(
    counts: Any,
    neuron: Any,
    inputs: NeuronKernelInputs,
    outputs: NeuronKernelOutputs,
    own: Any,
    *,
    settings: NeuronKernelSettings,
) -> None:
    """Writes the states of all segments, the sums of squared keys, and how many neurons fire.

    Args:
      counts: [B], the number of segments of each of B sources.
      neuron: [3], the leak, the threshold and 1 divided by the threshold.
      own: [M, K, P], scratch memory for A_j of each segment j.
    """
    count = counts[pl.program_id(1)]
    total, outputs.squares[...] = _segment_sums(inputs, own, settings)

    def fire_segment(j: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # The carry has the membrane potentials after the reset and, for each neuron, the number of
        # existing segments so far in which it fired.
        membrane, fired = carry
        membrane = neuron[0] * membrane + _neuron_input(own[j], total, settings)
        above = membrane * neuron[2] - 1
        outputs.states[j] = jnp.maximum(above, 0).astype(outputs.states.dtype)
        counted = jnp.where(j < count, 1.0, 0.0)
        fired += jnp.where(above > 0, counted, 0)
        return _reset(membrane, neuron), fired

    zeros = jnp.zeros(own.shape[1:], jnp.float32)
    _, fired = unrolled_loop(own.shape[0], fire_segment, (zeros, zeros))
    outputs.fired[...] = jnp.sum(fired, axis=0, keepdims=True)


def backward_kernel(
    neuron: Any,
    inputs: NeuronKernelInputs,
    results: NeuronKernelGradients,
    own: Any,
    *,
    settings: NeuronKernelSettings,
) -> None:
    """Writes the gradients of keys and values, and adds to the gradients of the parameters.

    Args:
      neuron: as for `forward_kernel`.
      own: [M, K, P], scratch memory for A_j, then for U_j before its reset, then for the gradient
        of U_j.
    """
    count, leak, inverse = own.shape[0], neuron[0], neuron[2]

    @pl.when(pl.program_id(1) == 0)
    def _clear_sums() -> None:
        for sums in (results.kernel, results.neuron):
            sums[...] = jnp.zeros_like(sums)

    total = _segment_sums(inputs, own, settings)[0]

    def potential_of_segment(j: Any, membrane: Array) -> Array:
        own[j] = leak * membrane + _neuron_input(own[j], total, settings)
        return _reset(own[j], neuron)

    def potential_backward(i: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        # The carry has the gradient of the potential of segment j + 1, and three sums over the
        # segments after j: the gradients of the neurons' inputs, of the leak and of the threshold.
        j = count - 1 - i
        later, d_total, d_leak, d_threshold = carry
        above = own[j] * inverse - 1 > 0
        direct = jnp.where(above, inputs.states[j].astype(jnp.float32) * inverse, 0)
        d_leak += later * _reset(own[j], neuron)
        d_threshold -= direct * own[j] * inverse + leak * jnp.where(above, later, 0)
        own[j] = later = direct + leak * later
        return later, d_total + later, d_leak, d_threshold

    zeros = jnp.zeros(own.shape[1:], jnp.float32)
    unrolled_loop(count, potential_of_segment, zeros)
    _, d_total, d_leak, d_threshold = unrolled_loop(
        count, potential_backward, (zeros, zeros, zeros, zeros)
    )
    for row, row_gradient in enumerate((d_leak, d_threshold)):
        results.neuron[row : row + 1] += jnp.sum(row_gradient, axis=0, keepdims=True)

    def products_backward(j: Any, d_kernel: Array) -> Array:
        keys, raw, kernel = inputs.keys[j], inputs.values[j], inputs.kernel[...]
        d_own = d_total - own[j] if settings.remaining else own[j]
        d_own = _block_diagonal(d_own, settings).astype(keys.dtype)
        d_keys = dot_float32(_projected_values(inputs, j), d_own, NT)
        d_keys += 2 * keys.astype(jnp.float32) * inputs.squares[...]
        d_values = dot_float32(keys, d_own, NN).astype(keys.dtype)
        results.keys[j] = d_keys.astype(keys.dtype)
        results.values[j] = dot_float32(d_values, kernel, NT).astype(keys.dtype)
        return d_kernel + dot_float32(raw, d_values, TN)

    d_kernel = unrolled_loop(count, products_backward, jnp.zeros(inputs.kernel.shape, jnp.float32))
    results.kernel[...] += _diagonal_blocks(d_kernel, settings)


def _segment_sums(
    inputs: NeuronKernelInputs, own: Any, settings: NeuronKernelSettings
) -> tuple[Array, Array]:
    """Writes A_j of each segment j to `own`; returns the sums of all A_j and of squared keys."""

    def add_segment(j: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        keys = inputs.keys[j]
        own[j] = _diagonal_blocks(dot_float32(keys, _projected_values(inputs, j), TN), settings)
        squares = jnp.square(keys.astype(jnp.float32))
        return carry[0] + own[j], carry[1] + jnp.sum(squares, axis=0, keepdims=True)

    zeros = (jnp.zeros(shape, jnp.float32) for shape in (own.shape[1:], (1, own.shape[2])))
    return unrolled_loop(own.shape[0], add_segment, tuple(zeros))


def _projected_values(inputs: NeuronKernelInputs, j: Any) -> Float[Array, "S P"]:
    values = inputs.values[j]
    return dot_float32(values, inputs.kernel[...], NN).astype(values.dtype)


def _neuron_input(own: Array, total: Array, settings: NeuronKernelSettings) -> Float[Array, "K P"]:
    return total - own if settings.remaining else own


def _reset(membrane: Array, neuron: Any) -> Array:
    return membrane - jnp.where(membrane * neuron[2] - 1 > 0, neuron[1], 0)


def _head_index(width: int, wide: int) -> Array:
    return jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (width, wide), 1), width)


def _diagonal_blocks(x: Float[Array, "P P"], settings: NeuronKernelSettings) -> Float[Array, "K P"]:
    """Returns the products of each head with itself, from the products x of all pairs of heads."""
    width, wide = settings.width, x.shape[1]
    results, head = x[:width], _head_index(width, wide)
    for i in range(1, wide // width):
        results = jnp.where(head == i, x[i * width : (i + 1) * width], results)
    return results


def _block_diagonal(x: Float[Array, "K P"], settings: NeuronKernelSettings) -> Float[Array, "P P"]:
    """Returns the heads' matrices as the diagonal blocks of one matrix, with zeros elsewhere."""
    head = _head_index(*x.shape)
    return jnp.concatenate(
        [jnp.where(head == i, x, 0) for i in range(x.shape[1] // settings.width)], axis=0
    )
