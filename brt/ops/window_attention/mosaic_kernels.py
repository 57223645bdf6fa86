"""Bodies of the Mosaic GPU kernels of window attention; see `pallas_mosaic_gpu` for the algorithm.

One warpgroup runs a kernel for one tile of the outputs, in a loop over tiles of the inputs. Inputs
and outputs are in global memory, and the other references of a kernel in shared memory. There, each
array of the loop has one or several slots for the tiles of a step: while the warpgroup computes
with one slot, the copies of the tiles of later steps to the other slots are under way. `arrived`
has a barrier for each slot, at which its copies arrive, and `ready` is the barrier of the copies
before the loop.

The shared memory `strip` holds tiles [TILE, TILE] of biases and mask; `row` holds the two numbers
of each query (`inputs.sums`), and `factors` the factors of dropout (None without it). If
`null_keys`, keys that the cache mask hides count as zero keys with zero values.

Within a kernel, functions named `copy_...` start the copies for step n of the loop to the slot with
the index `slot`, which arrive at `barrier`. Functions named `add_...` compute step n from that
slot. In shapes, Z is the number of tokens with those of the block before the segment.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from brt.ops.gpu import LOG2E
from brt.ops.softmax import FLOOR
from brt.ops.window_attention.gpu_kernels import zero_unless
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
    query_tile: Any, keys: Any, values: Any, strip: Any, ready: Any, arrived: Any,
    factors: Any = None,
) -> None:  # fmt: skip
    """Writes a tile of y [B, T, H, K] and of the log-sum-exp [B, H, T / TILE, TILE]."""
    lane, head, i = program_place()
    width, (first, end) = query_tile.shape[3], inputs.key_tile_range(lane, i)
    begin = i if null_keys else first
    copy_vectors(inputs.q, (lane, i, head), query_tile.at[0], ready)
    barrier_wait(ready)

    def copy_key_tile(n: Any, slot: Any, barrier: Any) -> None:
        copy_vectors(inputs.keys, (lane, begin + n, head), keys.at[slot], barrier)
        copy_vectors(inputs.values, (lane, begin + n, head), values.at[slot], barrier)
        copy_square(inputs.strip, head, 0, begin + n - i, strip.at[slot], barrier)
        copy_factors(inputs, head, i, begin + n, factors, slot, barrier)

    # Each accumulator in `read` is for a part of the columns of the values.
    def attend_to_window(*read: Any) -> tuple[Array, Array]:
        def add_key_tile(n: Array, slot: Array, carry: tuple) -> tuple:
            top, total = carry
            may_read = begin + n >= first if null_keys else True
            logits = (
                zero_unless(may_read, tile_product(query_tile.at[opaque_zero(n)], keys.at[slot]))
                + strip[slot]
            )
            higher = jnp.maximum(top, LOG2E * jnp.max(logits, axis=1))
            weights, shrunk = (
                jnp.exp2(LOG2E * logits - broadcast_rows(higher)),
                jnp.exp2(top - higher),
            )
            total = total * shrunk + jnp.sum(weights, axis=1)
            weights = apply_dropout(zero_unless(may_read, weights), factors, slot).astype(
                query_tile.dtype
            )
            for part, sums in enumerate(read):
                sums[...] = sums[...] * broadcast_rows(shrunk, width)
                wgmma(sums, weights, values.at[slot, part])
            return higher, total

        # The running softmax starts with an additional logit, `softmax.FLOOR`, which belongs to no
        # key. In rows without visible keys, this logit has all the weight, so that the output is
        # zero. In other rows its weight is zero, because FLOOR is far below the logits of visible
        # keys.
        # The carry is the maximum of each row's logits, times log2(e), and the sum of its weights.
        start = constant(LOG2E * FLOOR, TILE), constant(1.0, TILE)
        return CopyRing(arrived, copy_key_tile).run_steps(end - begin, add_key_tile, start)

    read, (top, total) = accumulate(query_tile.shape[1], width, attend_to_window)
    lse[lane, head, i] = top / LOG2E + jnp.log(total)
    share = broadcast_rows(1.0 / total, width)
    write_vectors([x * share for x in read], query_tile.at[0], y, (lane, i, head))


def window_attention_queries(
    inputs: WindowMosaicInputs, d_q: Any, *, null_keys: bool,
    query_tile: Any, output_gradient: Any, row: Any, ready: Any,
    keys: Any, values: Any, strip: Any, arrived: Any, factors: Any = None,
) -> None:  # fmt: skip
    """Writes a tile of d_q [B, T, H, K], the gradient of the queries."""
    lane, head, i = program_place()
    first, end = inputs.key_tile_range(lane, i)
    begin = i if null_keys else first
    copy_vectors(inputs.q, (lane, i, head), query_tile.at[0], ready)
    copy_vectors(inputs.gradient, (lane, i, head), output_gradient.at[0], ready)
    copy_numbers(inputs.sums, (lane, i, head), row.at[0], ready)
    barrier_wait(ready)

    def copy_key_tile(n: Any, slot: Any, barrier: Any) -> None:
        copy_vectors(inputs.keys, (lane, begin + n, head), keys.at[slot], barrier)
        copy_vectors(inputs.values, (lane, begin + n, head), values.at[slot], barrier)
        copy_square(inputs.strip, head, 0, begin + n - i, strip.at[slot], barrier)
        copy_factors(inputs, head, i, begin + n, factors, slot, barrier)

    def sum_gradients(*totals: Any) -> None:
        def add_key_tile(n: Array, slot: Array, carry: tuple) -> tuple:
            may_read = begin + n >= first if null_keys else True
            logits = (
                zero_unless(may_read, tile_product(query_tile.at[opaque_zero(n)], keys.at[slot]))
                + strip[slot]
            )
            weights = jnp.exp2(LOG2E * (logits - read_by_row(row.at[0, 0])))
            d_weights = apply_dropout(
                tile_product(output_gradient.at[opaque_zero(n)], values.at[slot]), factors, slot
            )
            # Null keys are zero, so they contribute nothing to the gradient of the queries.
            d_logits = zero_unless(may_read, weights * (d_weights - read_by_row(row.at[0, 1])))
            for part, total in enumerate(totals):
                wgmma(total, d_logits.astype(query_tile.dtype), keys.at[slot, part])
            return carry

        CopyRing(arrived, copy_key_tile).run_steps(end - begin, add_key_tile, ())

    results, _ = accumulate(query_tile.shape[1], query_tile.shape[3], sum_gradients)
    write_vectors(results, query_tile.at[0], d_q, (lane, i, head))


def window_attention_keys(
    inputs: WindowMosaicInputs, d_keys: Any, d_values: Any, *,
    key_tile: Any, value_tile: Any, ready: Any,
    q: Any, gradient: Any, strip: Any, row: Any, arrived: Any, factors: Any = None,
) -> None:  # fmt: skip
    """Writes some columns of a tile of d_keys and d_values [B, Z, H, K].

    If a head is wide, both gradients do not fit into the registers of one program. A program
    therefore computes only one part of the columns; its index along the grid's last axis says which
    tile and which part.
    """
    lane, head, program = program_place()
    j, part = jax.lax.div(program, key_tile.shape[1]), jax.lax.rem(program, key_tile.shape[1])
    begin, end = inputs.query_tile_range(lane, j)
    copy_vectors(inputs.keys, (lane, j, head), key_tile.at[0], ready)
    copy_vectors(inputs.values, (lane, j, head), value_tile.at[0], ready)
    barrier_wait(ready)

    # The tiles of the strip and of dropout are transposed: their rows are the keys.
    def copy_query_tile(n: Any, slot: Any, barrier: Any) -> None:
        copy_vectors(inputs.q, (lane, begin + n, head), q.at[slot], barrier)
        copy_vectors(inputs.gradient, (lane, begin + n, head), gradient.at[slot], barrier)
        column = inputs.tiles_per_window + begin + n - j
        copy_square(inputs.transposed_strip, head, 0, column, strip.at[slot], barrier)
        copy_factors(inputs, head, j, begin + n, factors, slot, barrier)
        copy_numbers(inputs.sums, (lane, begin + n, head), row.at[slot], barrier)

    def sum_gradients(keys_total: Any, values_total: Any) -> None:
        def add_query_tile(n: Array, slot: Array, carry: tuple) -> tuple:
            logits = tile_product(key_tile.at[opaque_zero(n)], q.at[slot]) + strip[slot]
            weights = jnp.exp2(LOG2E * (logits - read_by_column(row.at[slot, 0])))
            kept = apply_dropout(weights, factors, slot)
            wgmma(values_total, kept.astype(key_tile.dtype), gradient.at[slot, part])
            d_weights = apply_dropout(
                tile_product(value_tile.at[opaque_zero(n)], gradient.at[slot]), factors, slot
            )
            d_logits = weights * (d_weights - read_by_column(row.at[slot, 1]))
            wgmma(keys_total, d_logits.astype(key_tile.dtype), q.at[slot, part])
            return carry

        CopyRing(arrived, copy_query_tile).run_steps(end - begin, add_query_tile, ())

    (keys_total, values_total), _ = accumulate(2, key_tile.shape[3], sum_gradients)
    write_vectors([keys_total], key_tile.at[0], d_keys, (lane, j, head), part)
    write_vectors([values_total], value_tile.at[0], d_values, (lane, j, head), part)


def window_attention_band(
    inputs: WindowMosaicInputs, d_strip: Any, *, null_keys: bool, tiles_per_program: int,
    strip: Any, ready: Any,
    q: Any, gradient: Any, keys: Any, values: Any, row: Any, arrived: Any, factors: Any = None,
) -> None:  # fmt: skip
    """Writes a part of the gradient of one tile of the strip, to d_strip [G, H, TILE, W + TILE].

    A tile of the strip belongs to one distance, in tiles, between queries and keys. Its gradient is
    the sum of the gradients of the logits of all pairs of a query tile and a key tile with this
    distance. A program adds up the pairs of one of G groups, each of `tiles_per_program`
    consecutive query tiles of a row of the batch. The caller adds up the groups.
    """
    group, head, distance = program_place()
    groups = inputs.q.shape[1] // TILE // tiles_per_program
    lane, begin = jax.lax.div(group, groups), jax.lax.rem(group, groups) * tiles_per_program
    copy_square(inputs.strip, head, 0, distance, strip.at[0], ready)
    barrier_wait(ready)

    def copy_tile_pair(n: Any, slot: Any, barrier: Any) -> None:
        # The window of query tile i begins at key tile i, so its tile at this distance is j.
        i, j = begin + n, begin + n + distance
        copy_vectors(inputs.q, (lane, i, head), q.at[slot], barrier)
        copy_vectors(inputs.gradient, (lane, i, head), gradient.at[slot], barrier)
        copy_vectors(inputs.keys, (lane, j, head), keys.at[slot], barrier)
        copy_vectors(inputs.values, (lane, j, head), values.at[slot], barrier)
        copy_factors(inputs, head, i, j, factors, slot, barrier)
        copy_numbers(inputs.sums, (lane, i, head), row.at[slot], barrier)

    def add_tile_pair(n: Array, slot: Array, total: Array) -> Array:
        first, _ = inputs.key_tile_range(lane, begin + n)
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

    total = CopyRing(arrived, copy_tile_pair).run_steps(
        tiles_per_program, add_tile_pair, constant(0.0, TILE, TILE)
    )
    write_square(total, strip.at[0], d_strip, (group, head, distance))


def apply_dropout(x: Array, factors: Any, slot: Array) -> Array:
    return x if factors is None else x * factors[slot]
