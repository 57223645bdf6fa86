"""What a TPU does for a lane and as many heads as fill its lanes: see `pallas_tpu`.

P is the width of these heads together, 128: what there is of each, K x K, lies side by side, K x P.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops.tpu import NN, NT, TN, dot_float32, unrolled_loop


class Static(NamedTuple):
    """What is known when tracing.

    Attributes:
      width, wide: of a head, and of all heads of a step.
      remaining: whether neurons read the other segments, not their own.
      interpret: runs on any device, slowly.
    """

    width: int
    wide: int
    remaining: bool
    interpret: bool | pltpu.InterpretParams


class Inputs(NamedTuple):
    """Of a step of the grid, or where they are; None: there is none.

    Attributes:
      keys, values: [M, S, P].
      kernel: [P, P], W of each head.
      bias: [1, P], or None.
      states: [M, K, P], their gradient; of it the rest, in the backward pass only.
      squares: [1, P], the gradient of the sums of squared keys.
    """

    keys: Any
    values: Any
    kernel: Any
    bias: Any
    states: Any = None
    squares: Any = None


class Outputs(NamedTuple):
    """Of a step.

    Attributes:
      states: [M, K, P].
      squares: [1, P], float32, of the keys.
      fired: [1, P], float32: states above 0 in the segments that count.
    """

    states: Any
    squares: Any
    fired: Any


class Gradients(NamedTuple):
    """Of a step; but for those of keys and values float32, added up over all lanes.

    Attributes:
      neuron: [2, P], of leak and threshold.
    """

    keys: Any
    values: Any
    kernel: Any
    bias: Any
    neuron: Any


def forward_kernel(
    counts: Any, neuron: Any, inputs: Inputs, outputs: Outputs, own: Any, *, settings: Static
) -> None:
    """`own` [M, K, P] keeps the A_j; `neuron`: leak, threshold and its inverse."""
    count = counts[pl.program_id(1)]
    total, outputs.squares[...] = _sums(inputs, own, settings)

    def fire(j: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        membrane, fired = carry
        membrane = neuron[0] * membrane + _input(own[j], total, inputs, settings)
        above = membrane * neuron[2] - 1
        outputs.states[j] = jnp.maximum(above, 0).astype(outputs.states.dtype)
        counted = jnp.where(j < count, 1.0, 0.0)
        fired += jnp.where(above > 0, counted, 0)
        return _reset(membrane, neuron), fired

    zeros = jnp.zeros(own.shape[1:], jnp.float32)
    _, fired = unrolled_loop(own.shape[0], fire, (zeros, zeros))
    outputs.fired[...] = jnp.sum(fired, axis=0, keepdims=True)


def backward_kernel(
    neuron: Any, inputs: Inputs, results: Gradients, own: Any, *, settings: Static
) -> None:
    """`own` holds A_j, then U_j before its reset, then the gradient of U_j."""
    count, leak, inverse = own.shape[0], neuron[0], neuron[2]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for sums in (results.kernel, results.bias, results.neuron):
            if sums is not None:
                sums[...] = jnp.zeros_like(sums)

    total = _sums(inputs, own, settings)[0]

    def charge(j: Any, membrane: Array) -> Array:
        own[j] = leak * membrane + _input(own[j], total, inputs, settings)
        return _reset(own[j], neuron)

    def back(i: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        j = count - 1 - i
        later, d_total, d_leak, d_threshold = carry
        above = own[j] * inverse - 1 > 0
        direct = jnp.where(above, inputs.states[j].astype(jnp.float32) * inverse, 0)
        d_leak += later * _reset(own[j], neuron)
        d_threshold -= direct * own[j] * inverse + leak * jnp.where(above, later, 0)
        own[j] = later = direct + leak * later
        return later, d_total + later, d_leak, d_threshold

    zeros = jnp.zeros(own.shape[1:], jnp.float32)
    unrolled_loop(count, charge, zeros)
    _, d_total, d_leak, d_threshold = unrolled_loop(count, back, (zeros, zeros, zeros, zeros))
    if results.bias is not None:
        results.bias[...] += jnp.sum(d_total, axis=0, keepdims=True)
    for row, of_row in enumerate((d_leak, d_threshold)):
        results.neuron[row : row + 1] += jnp.sum(of_row, axis=0, keepdims=True)

    def through_products(j: Any, d_kernel: Array) -> Array:
        keys, raw, kernel = inputs.keys[j], inputs.values[j], inputs.kernel[...]
        d_own = d_total - own[j] if settings.remaining else own[j]
        d_own = _apart(d_own, settings).astype(keys.dtype)
        d_keys = dot_float32(_weighted(inputs, j), d_own, NT)
        d_keys += 2 * keys.astype(jnp.float32) * inputs.squares[...]
        d_values = dot_float32(keys, d_own, NN).astype(keys.dtype)
        results.keys[j] = d_keys.astype(keys.dtype)
        results.values[j] = dot_float32(d_values, kernel, NT).astype(keys.dtype)
        return d_kernel + dot_float32(raw, d_values, TN)

    d_kernel = unrolled_loop(count, through_products, jnp.zeros(inputs.kernel.shape, jnp.float32))
    results.kernel[...] += _side_by_side(d_kernel, settings)


def _sums(inputs: Inputs, own: Any, settings: Static) -> tuple[Array, Array]:
    """A_j of each segment into `own`, their sum, and that of squared keys."""

    def add(j: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        keys = inputs.keys[j]
        own[j] = _side_by_side(dot_float32(keys, _weighted(inputs, j), TN), settings)
        squares = jnp.square(keys.astype(jnp.float32))
        return carry[0] + own[j], carry[1] + jnp.sum(squares, axis=0, keepdims=True)

    zeros = (jnp.zeros(shape, jnp.float32) for shape in (own.shape[1:], (1, own.shape[2])))
    return unrolled_loop(own.shape[0], add, tuple(zeros))


def _weighted(inputs: Inputs, j: Any) -> Float[Array, "S P"]:
    """V_j W."""
    values = inputs.values[j]
    return dot_float32(values, inputs.kernel[...], NN).astype(values.dtype)


def _input(own: Array, total: Array, inputs: Inputs, settings: Static) -> Float[Array, "K P"]:
    x = total - own if settings.remaining else own
    return x if inputs.bias is None else x + inputs.bias[...]


def _reset(membrane: Array, neuron: Any) -> Array:
    return membrane - jnp.where(membrane * neuron[2] - 1 > 0, neuron[1], 0)


def _head(width: int, wide: int) -> Array:
    return jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (width, wide), 1), width)


def _side_by_side(x: Float[Array, "P P"], settings: Static) -> Float[Array, "K P"]:
    """Of products of all heads with all, those with themselves."""
    width, wide = settings.width, x.shape[1]
    results, head = x[:width], _head(width, wide)
    for i in range(1, wide // width):
        results = jnp.where(head == i, x[i * width : (i + 1) * width], results)
    return results


def _apart(x: Float[Array, "K P"], settings: Static) -> Float[Array, "P P"]:
    """Zeros between one head and another."""
    head = _head(*x.shape)
    return jnp.concatenate(
        [jnp.where(head == i, x, 0) for i in range(x.shape[1] // settings.width)], axis=0
    )
