"""Bodies of the Mosaic GPU kernels of window attention; `pallas_mosaic_gpu` describes the
algorithm.

A kernel is a function of its inputs in global memory (`mosaic_inputs.WindowMosaicInputs`), the
references to its outputs, and its shared memory. One warpgroup runs the function for one tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from brt.ops.softmax import FLOOR
from brt.ops.window_attention.gpu_kernels import LOG2E, zero_unless
from brt.ops.window_attention.mosaic_inputs import TILE, WindowMosaicInputs, opaque_zero
from brt.ops.window_attention.mosaic_tiles import (
    CopyRing,
    accumulate,
    barrier_wait,
    broadcast_rows,
    constant,
    copy_factors,
    copy_numbers,
    copy_square,
    copy_vectors,
    program_place,
    read_by_column,
    read_by_row,
    tile_product,
    wgmma,
    write_square,
    write_vectors,
)


def window_attention_forward(
    inputs: WindowMosaicInputs, y: Any, lse: Any, *, null_keys: bool,
    own: Any, keys: Any, values: Any, strip: Any, ready: Any, arrived: Any, factors: Any = None,
) -> None:  # fmt: skip
    """Computes the output and log-sum-exp of a tile of queries with a running softmax."""
    lane, head, i = program_place()
    width, (first, end) = own.shape[3], inputs.seen(lane, i)
    begin = i if null_keys else first
    copy_vectors(inputs.q, (lane, i, head), own.at[0], ready)
    barrier_wait(ready)

    def copy(n: Any, slot: Any, barrier: Any) -> None:
        copy_vectors(inputs.keys, (lane, begin + n, head), keys.at[slot], barrier)
        copy_vectors(inputs.values, (lane, begin + n, head), values.at[slot], barrier)
        copy_square(inputs.strip, head, 0, begin + n - i, strip.at[slot], barrier)
        copy_factors(inputs, head, i, begin + n, factors, slot, barrier)

    def walk(*read: Any) -> tuple[Array, Array]:
        def add(n: Array, slot: Array, carry: tuple) -> tuple:
            top, total = carry
            may_read = begin + n >= first if null_keys else True
            logits = (
                zero_unless(may_read, tile_product(own.at[opaque_zero(n)], keys.at[slot]))
                + strip[slot]
            )
            higher = jnp.maximum(top, LOG2E * jnp.max(logits, axis=1))
            weights, shrunk = (
                jnp.exp2(LOG2E * logits - broadcast_rows(higher)),
                jnp.exp2(top - higher),
            )
            total = total * shrunk + jnp.sum(weights, axis=1)
            weights = apply_dropout(zero_unless(may_read, weights), factors, slot).astype(own.dtype)
            for part, sums in enumerate(read):
                sums[...] = sums[...] * broadcast_rows(shrunk, width)
                wgmma(sums, weights, values.at[slot, part])
            return higher, total

        # Start with the virtual logit `softmax.FLOOR`, which takes all the mass of rows without
        # keys.
        start = constant(LOG2E * FLOOR, TILE), constant(1.0, TILE)
        return CopyRing(arrived, copy).walk(end - begin, add, start)

    read, (top, total) = accumulate(own.shape[1], width, walk)
    lse[lane, head, i] = top / LOG2E + jnp.log(total)
    share = broadcast_rows(1.0 / total, width)
    write_vectors([x * share for x in read], own.at[0], y, (lane, i, head))


def window_attention_queries(
    inputs: WindowMosaicInputs, d_q: Any, *, null_keys: bool,
    own: Any, theirs: Any, row: Any, ready: Any,
    keys: Any, values: Any, strip: Any, arrived: Any, factors: Any = None,
) -> None:  # fmt: skip
    """Computes the gradient of a tile of queries."""
    lane, head, i = program_place()
    first, end = inputs.seen(lane, i)
    begin = i if null_keys else first
    copy_vectors(inputs.q, (lane, i, head), own.at[0], ready)
    copy_vectors(inputs.gradient, (lane, i, head), theirs.at[0], ready)
    copy_numbers(inputs.sums, (lane, i, head), row.at[0], ready)
    barrier_wait(ready)

    def copy(n: Any, slot: Any, barrier: Any) -> None:
        copy_vectors(inputs.keys, (lane, begin + n, head), keys.at[slot], barrier)
        copy_vectors(inputs.values, (lane, begin + n, head), values.at[slot], barrier)
        copy_square(inputs.strip, head, 0, begin + n - i, strip.at[slot], barrier)
        copy_factors(inputs, head, i, begin + n, factors, slot, barrier)

    def walk(*totals: Any) -> None:
        def add(n: Array, slot: Array, carry: tuple) -> tuple:
            may_read = begin + n >= first if null_keys else True
            logits = (
                zero_unless(may_read, tile_product(own.at[opaque_zero(n)], keys.at[slot]))
                + strip[slot]
            )
            weights = jnp.exp2(LOG2E * (logits - read_by_row(row.at[0, 0])))
            d_weights = apply_dropout(
                tile_product(theirs.at[opaque_zero(n)], values.at[slot]), factors, slot
            )
            # Null keys are zero, so they contribute nothing to the gradient.
            d_logits = zero_unless(may_read, weights * (d_weights - read_by_row(row.at[0, 1])))
            for part, total in enumerate(totals):
                wgmma(total, d_logits.astype(own.dtype), keys.at[slot, part])
            return carry

        CopyRing(arrived, copy).walk(end - begin, add, ())

    results, _ = accumulate(own.shape[1], own.shape[3], walk)
    write_vectors(results, own.at[0], d_q, (lane, i, head))


def window_attention_keys(
    inputs: WindowMosaicInputs, d_keys: Any, d_values: Any, *,
    own: Any, theirs: Any, ready: Any,
    q: Any, gradient: Any, strip: Any, row: Any, arrived: Any, factors: Any = None,
) -> None:  # fmt: skip
    """Computes gradients of one part of a tile of keys and values, from all queries that may read
    it.
    """
    lane, head, program = program_place()
    j, part = jax.lax.div(program, own.shape[1]), jax.lax.rem(program, own.shape[1])
    begin, end = inputs.readers(lane, j)
    copy_vectors(inputs.keys, (lane, j, head), own.at[0], ready)
    copy_vectors(inputs.values, (lane, j, head), theirs.at[0], ready)
    barrier_wait(ready)

    def copy(n: Any, slot: Any, barrier: Any) -> None:
        copy_vectors(inputs.q, (lane, begin + n, head), q.at[slot], barrier)
        copy_vectors(inputs.gradient, (lane, begin + n, head), gradient.at[slot], barrier)
        column = inputs.per_window + begin + n - j
        copy_square(inputs.transposed_strip, head, 0, column, strip.at[slot], barrier)
        copy_factors(inputs, head, j, begin + n, factors, slot, barrier)
        copy_numbers(inputs.sums, (lane, begin + n, head), row.at[slot], barrier)

    def walk(keys_total: Any, values_total: Any) -> None:
        def add(n: Array, slot: Array, carry: tuple) -> tuple:
            logits = tile_product(own.at[opaque_zero(n)], q.at[slot]) + strip[slot]
            weights = jnp.exp2(LOG2E * (logits - read_by_column(row.at[slot, 0])))
            kept = apply_dropout(weights, factors, slot)
            wgmma(values_total, kept.astype(own.dtype), gradient.at[slot, part])
            d_weights = apply_dropout(
                tile_product(theirs.at[opaque_zero(n)], gradient.at[slot]), factors, slot
            )
            d_logits = weights * (d_weights - read_by_column(row.at[slot, 1]))
            wgmma(keys_total, d_logits.astype(own.dtype), q.at[slot, part])
            return carry

        CopyRing(arrived, copy).walk(end - begin, add, ())

    (keys_total, values_total), _ = accumulate(2, own.shape[3], walk)
    write_vectors([keys_total], own.at[0], d_keys, (lane, j, head), part)
    write_vectors([values_total], theirs.at[0], d_values, (lane, j, head), part)


def window_attention_band(
    inputs: WindowMosaicInputs, d_strip: Any, *, null_keys: bool, walk: int,
    strip: Any, ready: Any,
    q: Any, gradient: Any, keys: Any, values: Any, row: Any, arrived: Any, factors: Any = None,
) -> None:  # fmt: skip
    """Sums the gradient of a tile of the strip over `walk` tiles of queries."""
    group, head, distance = program_place()
    groups = inputs.q.shape[1] // TILE // walk
    lane, begin = jax.lax.div(group, groups), jax.lax.rem(group, groups) * walk
    copy_square(inputs.strip, head, 0, distance, strip.at[0], ready)
    barrier_wait(ready)

    def copy(n: Any, slot: Any, barrier: Any) -> None:
        i, j = begin + n, begin + n + distance
        copy_vectors(inputs.q, (lane, i, head), q.at[slot], barrier)
        copy_vectors(inputs.gradient, (lane, i, head), gradient.at[slot], barrier)
        copy_vectors(inputs.keys, (lane, j, head), keys.at[slot], barrier)
        copy_vectors(inputs.values, (lane, j, head), values.at[slot], barrier)
        copy_factors(inputs, head, i, j, factors, slot, barrier)
        copy_numbers(inputs.sums, (lane, i, head), row.at[slot], barrier)

    def add(n: Array, slot: Array, total: Array) -> Array:
        first, _ = inputs.seen(lane, begin + n)
        may_read = begin + n + distance >= first
        pair = (
            tile_product(q.at[slot], keys.at[slot]),
            tile_product(gradient.at[slot], values.at[slot]),
        )
        product, d_weights = (zero_unless(may_read, x) for x in pair) if null_keys else pair
        weights = jnp.exp2(LOG2E * (product + strip[opaque_zero(n)] - read_by_row(row.at[slot, 0])))
        d_logits = weights * (
            apply_dropout(d_weights, factors, slot) - read_by_row(row.at[slot, 1])
        )
        return total + (d_logits if null_keys else zero_unless(may_read, d_logits))

    total = CopyRing(arrived, copy).walk(walk, add, constant(0.0, TILE, TILE))
    write_square(total, strip.at[0], d_strip, (group, head, distance))


def apply_dropout(x: Array, factors: Any, slot: Array) -> Array:
    """Multiplies x by dropout's factors in a slot of shared memory, if there is dropout."""
    return x if factors is None else x * factors[slot]
