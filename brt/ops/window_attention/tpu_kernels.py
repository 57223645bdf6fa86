"""Bodies of the TPU kernels of window attention, for one head, row of the batch and block.

The module `pallas_tpu` describes the algorithm. In the following, a row is a query of a block. The
W keys that it sees, of its own block and of the previous block, are in W slots. The rows of a block
are processed in tiles of R rows. A matrix of logits or weights has slots x rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from brt.ops.dispatch import from_bits, to_bits
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.tpu import (
    LANES,
    TN,
    dot_float32,
    l2_normalize_rows,
    l2_normalize_rows_backward,
)
from brt.ops.window_attention.tpu_arrays import (
    BlockDocuments,
    WindowKernelGradients,
    WindowKernelInputs,
)
from brt.ops.window_attention.tpu_tiles import (
    LoadedBlocks,
    RowTile,
    WindowKernelSettings,
    row_tiles,
)


def _load_blocks(
    documents: BlockDocuments, inputs: WindowKernelInputs, settings: WindowKernelSettings
) -> LoadedBlocks:
    start, seen = documents.n == 0, documents.document_start(0) < 0
    keys, values = (list(pair.previous_and_own(start)) for pair in (inputs.keys, inputs.values))
    inverse_norms = None
    if inputs.scale is not None:
        (before, _), (own, inverse_norms) = map(l2_normalize_rows, keys)
        keys = [x.astype(keys[0].dtype) for x in (before, own)]
    unseen = jnp.zeros(()) if documents.start_inside else jnp.where(seen, 0.0, MASKED)
    if settings.null_keys:
        for pair in (keys, values):
            pair[0] = jax.lax.select(seen, pair[0], jnp.zeros_like(pair[0]))
        unseen = jnp.zeros(())
    return LoadedBlocks((keys[0], keys[1]), (values[0], values[1]), unseen, inverse_norms)


def _load_queries(
    inputs: WindowKernelInputs, rows: RowTile
) -> tuple[Float[Array, "R K"], Float[Array, "R 1"] | None]:
    """Returns a tile's queries, and 1 / |q| for each if it is scaled to the norm `inputs.scale`."""
    own = inputs.q[rows.all]
    if inputs.scale is None:
        return own, None
    directions, inverse_norms = l2_normalize_rows(own)
    return (directions * inputs.scale[:, :1]).astype(own.dtype), inverse_norms


def forward_kernel(
    first: Any,
    inputs: WindowKernelInputs,
    outputs: tuple[Any, Any],
    *,
    settings: WindowKernelSettings,
) -> None:
    """Writes the output [W, K] and the log-sum-exp [1, W] of a block to `outputs`.

    Both arrays are written as unsigned integers with the same bits, because JAX saves integers for
    the backward pass without an additional operation (`dispatch.output_residual`). `first` is that
    of `BlockDocuments`.
    """
    y, lse = outputs
    dtype = inputs.values.own.dtype
    documents = BlockDocuments(first, pl.program_id(1), pl.program_id(2), y.shape[0], settings.part)
    block = _load_blocks(documents, inputs, settings)
    tiles, softmax = row_tiles(y.shape[0], settings), []
    # The weights of all tiles are computed before any sum: the softmax of a tile can then be
    # computed while the matrix units compute the logits of the next tile.
    for rows in tiles:
        logits = rows.logits(block, _load_queries(inputs, rows)[0], inputs.tile, documents)
        top = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), FLOOR)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=0, keepdims=True) + jnp.exp(FLOOR - top)
        if inputs.dropout is not None:
            weights = jnp.where(rows.dropout_mask(inputs.dropout), weights, 0.0)
        softmax.append((rows.unfold(weights, dtype), top, total))
    transposed = block.values[0].T, block.values[1].T
    for rows, ((current, before), top, total) in zip(tiles, softmax, strict=True):
        sums = rows.weighted_sums(transposed, current, before)
        y[rows.all] = to_bits((sums * (settings.scale / total)).T.astype(dtype))
        lse[:, rows.all] = to_bits(top + jnp.log(total))


def backward_kernel(
    first: Any, inputs: WindowKernelInputs, results: WindowKernelGradients,
    keys_sum: Any, values_sum: Any, *,
    settings: WindowKernelSettings,
) -> None:  # fmt: skip
    """Writes the gradients of one step to `results`.

    The steps of a segment go from its last block to its first. The gradients of a block's keys and
    values are sums over the queries of the block and of the next block. The step of the next block
    leaves its part in `keys_sum` and `values_sum` (float32 [W, K]). The step of the block adds its
    own part, writes the sums, and leaves its part of the gradients of the block before. After the
    first block of a segment, these are the gradients of the cached block. The gradients of
    `inputs.scale` and of the bias tile are sums, to which every step of a head adds.

    Only rare and short operations depend on the index of the step. The compiler schedules the
    operations before, in and after such a condition separately, and a long schedule is better.
    """
    lane, step = pl.program_id(1), pl.program_id(2)
    n = pl.num_programs(2) - 1 - step

    @pl.when(step == 0)
    def _start_segment() -> None:
        for total in (keys_sum, values_sum):
            total[...] = jnp.zeros_like(total)

    @pl.when((step == 0) & (lane == 0))
    def _start_head() -> None:
        for total in (results.scale, results.tile):
            if total is not None:
                total[...] = jnp.zeros_like(total)

    window = results.q.shape[0]
    documents = BlockDocuments(first, lane, n, window, settings.part)
    block = _load_blocks(documents, inputs, settings)
    for rows in reversed(row_tiles(window, settings)):
        _add_gradients(rows, block, inputs, results, (keys_sum, values_sum), documents, settings)

    @pl.when(n == 0)
    def _write_cache_gradients() -> None:
        results.cached_keys[...] = keys_sum[...].astype(results.cached_keys.dtype)
        values = values_sum[...] * settings.scale
        results.cached_values[...] = values.astype(results.cached_values.dtype)


def _add_gradients(
    rows: RowTile,
    block: LoadedBlocks,
    inputs: WindowKernelInputs,
    results: WindowKernelGradients,
    sums: tuple[Any, Any],
    documents: BlockDocuments,
    settings: WindowKernelSettings,
) -> None:
    """Adds the gradients of one tile of rows to `sums`, and writes those that are complete."""
    keys_sum, values_sum = sums
    (own, inverse_norms), theirs = _load_queries(inputs, rows), inputs.gradient[rows.all]
    lse = from_bits(inputs.lse[:, rows.all], jnp.float32)
    weights = kept = jnp.exp(rows.logits(block, own, inputs.tile, documents) - lse)
    d_weights = rows.folded_products(block.values, theirs)
    if inputs.dropout is not None:
        mask = rows.dropout_mask(inputs.dropout)
        kept, d_weights = (jnp.where(mask, x, 0.0) for x in (kept, d_weights * settings.scale))
    d_logits = weights * (d_weights - inputs.along[:, rows.all])
    if results.tile is not None:
        rows.add_rolled(results.tile, d_logits)
    d_logit_parts, weight_parts = (rows.unfold(x, own.dtype) for x in (d_logits, kept))

    # The order of the products matters: the schedule is shortest if those with values come first.
    d_values = rows.finished_sums(values_sum, weight_parts[0], theirs) * settings.scale
    results.values[rows.all] = d_values.astype(results.values.dtype)
    d_keys = rows.finished_sums(keys_sum, d_logit_parts[0], own)
    if block.inverse_norms is not None:
        d_keys, _ = l2_normalize_rows_backward(
            inputs.keys.own[rows.all], d_keys, block.inverse_norms[rows.all]
        )
    results.keys[rows.all] = d_keys.astype(results.keys.dtype)
    # The weights of keys of another document are zero, except those of null keys.
    seen = documents.document_start(0) < 0 if settings.null_keys else None
    for total, part, x in (
        (values_sum, weight_parts[1], theirs),
        (keys_sum, d_logit_parts[1], own),
    ):
        x = x if seen is None else jax.lax.select(seen, x, jnp.zeros_like(x))
        rows.add_to_previous(total, part, x)

    d_own = dot_float32(d_logit_parts[0], block.keys[1][rows.current], TN)
    d_own += dot_float32(d_logit_parts[1], block.keys[0][rows.before], TN)
    if inputs.scale is not None:
        d_own, along = l2_normalize_rows_backward(inputs.q[rows.all], d_own, inverse_norms)
        d_own *= inputs.scale[:, :1]
        results.scale[...] += jnp.broadcast_to(jnp.sum(along, axis=0, keepdims=True), (1, LANES))
    results.q[rows.all] = d_own.astype(results.q.dtype)
