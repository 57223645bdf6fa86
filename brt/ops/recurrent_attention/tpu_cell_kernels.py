"""What a TPU does for one head of a block of a lane, of the whole cell: see `tpu_cell`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from brt.ops.normalization import EPSILON
from brt.ops.recurrent_attention import tpu_kernels
from brt.ops.recurrent_attention.tpu_cell_arrays import (
    Flags,
    Gradients,
    Kept,
    Shown,
    Sums,
    Tokens,
    Weights,
)
from brt.ops.recurrent_attention.tpu_kernels import VALUES, Outputs, Static
from brt.ops.tpu import NN, NT, dot_float32, l2_normalize_rows_backward

_ROWS = 64  # of states that norm and gate take at once


def _by_rows(x: Any, body: Callable[[Any], None]) -> None:
    """For some rows after the others."""
    rows = math.gcd(_ROWS, x.shape[0])

    def some(i: Array, _: None) -> None:
        body(pl.ds(pl.multiple_of(i * rows, rows), rows))

    jax.lax.fori_loop(0, x.shape[0] // rows, some, None)


def _columns(parts: Any) -> Float[Array, "R PK"]:
    """Of a sequence of parts, or of a reference to an array of them."""
    count = len(parts) if isinstance(parts, tuple) else parts.shape[0]
    return jnp.concatenate([parts[i][...] for i in range(count)], axis=1)


def _inverse(s: Float[Array, "R D"]) -> Float[Array, "R 1"]:
    return jax.lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + EPSILON)


def forward_kernel(
    flags: Flags, tokens: tuple[Tokens, Tokens], vectors: Any, weights: Weights, kept: Kept,
    shown: Shown, final: Any, state: Any, update: Any, *, settings: Static,
) -> None:  # fmt: skip
    """All [S, D] in float32: `vectors` and `final` are the states before and after the segment,
    `state` and `update`, on the chip, those before a block, and what its heads add to them."""
    lane, n, head = (pl.program_id(axis) for axis in range(3))

    @pl.when((n == 0) & (head == 0))
    def _() -> None:
        state[...] = vectors[...]

    @pl.when(head == 0)
    def _() -> None:
        anew = flags.starts[lane, n] > 0

        def begin(rows: Any) -> None:
            s = jnp.where(anew, weights.initial[rows], state[rows])
            h = s * _inverse(s) * weights.norm[...] + weights.ids[rows]
            state[rows] = kept.vectors[rows] = s
            kept.hidden[rows] = h.astype(kept.hidden.dtype)
            update[rows] = jnp.zeros_like(s)

        _by_rows(state, begin)

    projected = dot_float32(kept.hidden[...], _columns(weights.projection), NN)
    for part, columns in enumerate(jnp.split(projected.astype(kept.projected.dtype), 4, axis=1)):
        kept.projected[part] = columns
    shown.values[...] = kept.projected[VALUES]
    keys, values = (part.both(n == 0) for part in tokens)
    inputs = tpu_kernels.Inputs(kept.projected, weights.scales, keys, values)
    outputs = Outputs(kept.y, shown.keys, kept.lse)
    tpu_kernels.read(flags.cache_mask[lane, n] > 0, inputs, outputs, settings)
    update[...] += dot_float32(
        _columns(kept.y), weights.output[...].reshape(-1, update.shape[1]), NN
    )

    @pl.when(head == pl.num_programs(2) - 1)
    def _() -> None:
        keeps = jax.nn.sigmoid(weights.gate[...])

        def end(rows: Any) -> None:
            state[rows] = final[rows] = keeps * state[rows] + (1 - keeps) * update[rows]

        _by_rows(state, end)


def backward_kernel(
    flags: Flags, tokens: tuple[Tokens, Tokens], gradient: Any, final: Any, weights: Weights,
    kept: Kept, shown: Shown, results: Gradients, sums: Sums, *, settings: Static,
) -> None:  # fmt: skip
    """`gradient`: of `final`; `shown`: gradients of what was. Blocks come in reverse order."""
    lane, step, head = (pl.program_id(axis) for axis in range(3))
    n = pl.num_programs(1) - 1 - step

    @pl.when((step == 0) & (head == 0))
    def _() -> None:
        def begin(rows: Any) -> None:
            sums.carry[rows], sums.after[rows] = gradient[rows], final[rows]
            results.initial[rows] = results.ids[rows] = jnp.zeros_like(gradient[rows])

        results.norm[...] = results.gate[...] = jnp.zeros_like(results.norm)
        _by_rows(gradient, begin)

    @pl.when(head == 0)
    def _() -> None:
        _through_gate(weights, kept, results, sums)

    for part in range(2):
        read = dot_float32(results.update[...], weights.output[part], NT)
        sums.read[part] = read.astype(sums.read.dtype)
    keys, values = (part.both(n == 0) for part in tokens)
    inputs = tpu_kernels.Inputs(
        kept.projected, weights.scales, keys, values, sums.read, tuple(shown), kept.y, kept.lse
    )
    seen = flags.cache_mask[lane, n] > 0
    results.scales[...] = jnp.zeros_like(results.scales)
    of_states = tpu_kernels.Gradients(results.projected, results.scales, None, None)
    tpu_kernels.add_gradients(seen, inputs, of_states, sums.attended, settings)
    _write_tokens(seen, head, step == 0, n == 0, keys, results, sums, settings)
    joined = _columns(results.projected), _columns(weights.projection)
    sums.hidden[...] += dot_float32(*joined, NT)

    @pl.when(head == pl.num_programs(2) - 1)
    def _() -> None:
        _through_norm(flags.starts[lane, n] > 0, weights, kept, results, sums)


def _through_gate(weights: Weights, kept: Kept, results: Gradients, sums: Sums) -> None:
    """The gradient of the update; that of the gate is told from the states on both sides of it."""
    keeps = jax.nn.sigmoid(weights.gate[...])

    def some(rows: Any) -> None:
        gradient, s = sums.carry[rows], kept.vectors[rows]
        results.update[rows] = ((1 - keeps) * gradient).astype(results.update.dtype)
        along = gradient * (s - sums.after[rows])
        results.gate[...] += keeps * jnp.sum(along, axis=0, keepdims=True)
        sums.after[rows] = s
        sums.hidden[rows] = jnp.zeros_like(gradient)

    _by_rows(sums.carry, some)


def _through_norm(
    anew: Array, weights: Weights, kept: Kept, results: Gradients, sums: Sums
) -> None:
    """The gradient of the states before a block, of which documents' first have learned ones."""
    keeps = jax.nn.sigmoid(weights.gate[...])

    def some(rows: Any) -> None:
        gradient, s = sums.hidden[rows], kept.vectors[rows]
        inverse = _inverse(s)
        direction = s * inverse
        results.ids[rows] += gradient
        results.norm[...] += jnp.sum(gradient * direction, axis=0, keepdims=True)
        gradient = gradient * weights.norm[...]
        along = jnp.mean(gradient * direction, axis=-1, keepdims=True)
        total = keeps * sums.carry[rows] + (gradient - along * direction) * inverse
        results.initial[rows] += jnp.where(anew, total, 0)
        sums.carry[rows] = results.vectors[rows] = jnp.where(anew, 0, total)

    _by_rows(sums.carry, some)


def _write_tokens(
    seen: Array, head: Array, last: Array, first: Array, keys: tuple[Array, Any],
    results: Gradients, sums: Sums, settings: Static,
) -> None:  # fmt: skip
    """Of this block's, to which the block behind it has added; of those before it on the chip."""
    window = keys[1].shape[0]
    raw = keys if settings.raw_keys else None, None
    both = zip(sums.attended, sums.behind, (results.keys, results.values), raw, strict=True)
    for total, behind, (cached, own), known in both:
        end = total.shape[0] - window
        of_before = total[end - window : end]
        of_own = total[end:] + jnp.where(last, 0, behind[head])
        if settings.null_keys:
            of_before = jax.lax.select(seen, of_before, jnp.zeros_like(of_before))
        behind[head] = of_before
        if known is not None:
            of_own = l2_normalize_rows_backward(known[1][...], of_own)[0]
        own[...] = of_own.astype(own.dtype)

        @pl.when(first)
        def _(of_before: Array = of_before, known: Any = known, cached: Any = cached) -> None:
            if known is not None:
                of_before = l2_normalize_rows_backward(known[0], of_before)[0]
            cached[...] = of_before.astype(cached.dtype)
