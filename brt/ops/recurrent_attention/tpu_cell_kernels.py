"""Bodies of the TPU kernels of the complete recurrent cell, for one head of a block of a lane.

The module `tpu_cell` describes the algorithm. A lane is a row of the batch. The grid is (lane,
block, head). The states of a block are normalized, attend with each head to the states and to the
tokens of two blocks, and are updated by a gate after the last head.

In shapes, B is the number of lanes, N of blocks, S of states, D of numbers of a state, and K of
numbers of a head.
"""

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
    BlockFlags,
    BlockStateKV,
    CellKernelGradients,
    CellKernelSums,
    CellKernelWeights,
    CellResiduals,
    TokenBlocks,
)
from brt.ops.recurrent_attention.tpu_kernels import VALUES, StateKernelOutputs, StateKernelSettings
from brt.ops.tpu import NN, NT, dot_float32, l2_normalize_rows_backward

# The norm and the gate are computed for one group of states after the other, so that intermediate
# results stay small. A group has at most this many states.
_ROWS = 64


def _for_rows(x: Any, body: Callable[[Any], None]) -> None:
    """Calls `body` for groups of rows, one after the other."""
    rows = math.gcd(_ROWS, x.shape[0])

    def call_body(i: Array, _: None) -> None:
        """Calls `body` with the slice that selects the rows of x in the i-th group."""
        body(pl.ds(pl.multiple_of(i * rows, rows), rows))

    jax.lax.fori_loop(0, x.shape[0] // rows, call_body, None)


def _concatenate_parts(parts: Any) -> Float[Array, "R PK"]:
    """Concatenates parts, or the arrays of one reference, along the columns."""
    count = len(parts) if isinstance(parts, tuple) else parts.shape[0]
    return jnp.concatenate([parts[i][...] for i in range(count)], axis=1)


def _inverse_rms(s: Float[Array, "R D"]) -> Float[Array, "R 1"]:
    return jax.lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + EPSILON)


def forward_kernel(
    flags: BlockFlags,
    tokens: tuple[TokenBlocks, TokenBlocks],
    vectors: Any,
    weights: CellKernelWeights,
    residuals: CellResiduals,
    state_kv: BlockStateKV,
    final: Any,
    state: Any,
    update: Any,
    *,
    settings: StateKernelSettings,
) -> None:
    """Computes one step of the forward pass, which is one head of a block, and writes its outputs.

    Args:
      flags: two arrays [B, N], which say where a block may read the previous block, and where a
        document starts.
      tokens: the keys, then the values, of the tokens of the previous block and of this block.
      vectors: [S, D], float32, the states before the segment.
      weights: the weights of the cell for this head.
      residuals: outputs, the arrays that the backward pass needs.
      state_kv: outputs, the keys and values of the states that tokens read.
      final: output, [S, D], float32, the states after the block; every block overwrites it, so that
        the last block leaves the states after the segment.
      state: [S, D], float32 scratch memory for the states before the block. The last head
        overwrites them with the states after the block.
      update: [S, D], float32 scratch memory, the sum of the heads' contributions to the update,
        with which the gate mixes the states.
      settings: static settings.
    """
    lane, n, head = (pl.program_id(axis) for axis in range(3))

    @pl.when((n == 0) & (head == 0))
    def _start_segment() -> None:
        state[...] = vectors[...]

    @pl.when(head == 0)
    def _start_block() -> None:
        restarts = flags.starts[lane, n] > 0

        def normalize_rows(rows: Any) -> None:
            """Prepares a group of states for the block; `rows` is the slice of the states' indices.

            The states before the block are written to `state` and `residuals.vectors`, and the
            input of the projection to `residuals.hidden`. The sum over the heads, `update`, is set
            to zero.
            """
            s = jnp.where(restarts, weights.initial[rows], state[rows])
            h = s * _inverse_rms(s) * weights.norm[...] + weights.ids[rows]
            state[rows] = residuals.vectors[rows] = s
            residuals.hidden[rows] = h.astype(residuals.hidden.dtype)
            update[rows] = jnp.zeros_like(s)

        _for_rows(state, normalize_rows)

    projected = dot_float32(residuals.hidden[...], _concatenate_parts(weights.projection), NN)
    for part, columns in enumerate(
        jnp.split(projected.astype(residuals.projected.dtype), 4, axis=1)
    ):
        residuals.projected[part] = columns
    state_kv.values[...] = residuals.projected[VALUES]
    keys, values = (part.previous_and_own(n == 0) for part in tokens)
    inputs = tpu_kernels.StateKernelInputs(residuals.projected, weights.scales, keys, values)
    outputs = StateKernelOutputs(residuals.y, state_kv.keys, residuals.lse)
    tpu_kernels.attend_states(flags.cache_mask[lane, n] > 0, inputs, outputs, settings)
    update[...] += dot_float32(
        _concatenate_parts(residuals.y), weights.output[...].reshape(-1, update.shape[1]), NN
    )

    @pl.when(head == pl.num_programs(2) - 1)
    def _end_block() -> None:
        keep = jax.nn.sigmoid(weights.gate[...])

        def apply_gate(rows: Any) -> None:
            """Writes a group of states after the block to `state` and `final`; `rows` is the slice
            of the states' indices.
            """
            state[rows] = final[rows] = keep * state[rows] + (1 - keep) * update[rows]

        _for_rows(state, apply_gate)


def backward_kernel(
    flags: BlockFlags,
    tokens: tuple[TokenBlocks, TokenBlocks],
    gradient: Any,
    final: Any,
    weights: CellKernelWeights,
    residuals: CellResiduals,
    state_kv: BlockStateKV,
    results: CellKernelGradients,
    sums: CellKernelSums,
    *,
    settings: StateKernelSettings,
) -> None:
    """Computes the gradients of one step, which is one head of a block, and writes them to
    `results` or adds them to sums there.

    The steps process the blocks in reverse order. The class `CellKernelGradients` says which of its
    fields are sums.

    Args:
      flags: two arrays [B, N], which say where a block may read the previous block, and where a
        document starts.
      tokens: the keys, then the values, of the tokens of the previous block and of this block.
      gradient: [S, D], the gradient of the states after the segment.
      final: [S, D], the states after the segment.
      weights: the weights of the cell for this head.
      residuals: arrays that the forward pass saved.
      state_kv: gradients of the state keys and values that tokens read.
      results: outputs, the gradients.
      sums: scratch memory for gradients that are passed between steps or summed over heads.
      settings: static settings.
    """
    lane, step, head = (pl.program_id(axis) for axis in range(3))
    n = pl.num_programs(1) - 1 - step

    @pl.when((step == 0) & (head == 0))
    def _start_segment() -> None:
        def initialize_rows(rows: Any) -> None:
            """Prepares the backward pass of a segment for a group of states; `rows` is the slice of
            their indices.

            The gradient of the final states and the final states themselves are copied to scratch
            memory, and the gradients that are summed over blocks are set to zero.
            """
            sums.carry[rows], sums.after[rows] = gradient[rows], final[rows]
            results.initial[rows] = results.ids[rows] = jnp.zeros_like(gradient[rows])

        results.norm[...] = results.gate[...] = jnp.zeros_like(results.norm)
        _for_rows(gradient, initialize_rows)

    @pl.when(head == 0)
    def _start_block() -> None:
        _gate_backward(weights, residuals, results, sums)

    for part in range(2):
        read = dot_float32(results.update[...], weights.output[part], NT)
        sums.read[part] = read.astype(sums.read.dtype)
    keys, values = (part.previous_and_own(n == 0) for part in tokens)
    inputs = tpu_kernels.StateKernelInputs(
        residuals.projected,
        weights.scales,
        keys,
        values,
        sums.read,
        tuple(state_kv),
        residuals.y,
        residuals.lse,
    )
    seen = flags.cache_mask[lane, n] > 0
    results.scales[...] = jnp.zeros_like(results.scales)
    state_gradients = tpu_kernels.StateKernelGradients(
        results.projected, results.scales, None, None
    )
    tpu_kernels.add_gradients(seen, inputs, state_gradients, sums.attended, settings)
    _write_token_gradients(seen, head, step == 0, n == 0, keys, results, sums, settings)
    joined = _concatenate_parts(results.projected), _concatenate_parts(weights.projection)
    sums.hidden[...] += dot_float32(*joined, NT)

    @pl.when(head == pl.num_programs(2) - 1)
    def _end_block() -> None:
        _norm_backward(flags.starts[lane, n] > 0, weights, residuals, results, sums)


def _gate_backward(
    weights: CellKernelWeights,
    residuals: CellResiduals,
    results: CellKernelGradients,
    sums: CellKernelSums,
) -> None:
    """Computes the gradients of the update and of the gate.

    The gate's gradient follows from the states before and after the block.
    """
    keep = jax.nn.sigmoid(weights.gate[...])

    def gate_backward_of_rows(rows: Any) -> None:
        """Computes the gradients of the gate's inputs for a group of states; `rows` is the slice of
        their indices.

        The gradient of the update is written. The gradient of the gate's bias is a sum over states
        and blocks, to which the group's contribution is added. Then `sums.after` gets the states
        before this block, which are the states after the next block to be processed, and
        `sums.hidden`, a sum over heads, is set to zero.
        """
        gradient, s = sums.carry[rows], residuals.vectors[rows]
        results.update[rows] = ((1 - keep) * gradient).astype(results.update.dtype)
        along = gradient * (s - sums.after[rows])
        results.gate[...] += keep * jnp.sum(along, axis=0, keepdims=True)
        sums.after[rows] = s
        sums.hidden[rows] = jnp.zeros_like(gradient)

    _for_rows(sums.carry, gate_backward_of_rows)


def _norm_backward(
    restarts: Array,
    weights: CellKernelWeights,
    residuals: CellResiduals,
    results: CellKernelGradients,
    sums: CellKernelSums,
) -> None:
    """Computes the gradient of the states before a block.

    At the start of a document, these are the learned initial states.
    """
    keep = jax.nn.sigmoid(weights.gate[...])

    def norm_backward_of_rows(rows: Any) -> None:
        """Computes the gradients of a group of states; `rows` is the slice of their indices.

        The gradient of the states before the block is written to `sums.carry` and
        `results.vectors`; it is zero at the start of a document. The gradients of the norm's scale,
        of the states' identity vectors and, at the start of a document, of the initial states are
        sums over blocks, to which this block's contribution is added.
        """
        gradient, s = sums.hidden[rows], residuals.vectors[rows]
        inverse = _inverse_rms(s)
        direction = s * inverse
        results.ids[rows] += gradient
        results.norm[...] += jnp.sum(gradient * direction, axis=0, keepdims=True)
        gradient = gradient * weights.norm[...]
        along = jnp.mean(gradient * direction, axis=-1, keepdims=True)
        total = keep * sums.carry[rows] + (gradient - along * direction) * inverse
        results.initial[rows] += jnp.where(restarts, total, 0)
        sums.carry[rows] = results.vectors[rows] = jnp.where(restarts, 0, total)

    _for_rows(sums.carry, norm_backward_of_rows)


def _write_token_gradients(
    seen: Array, head: Array, last: Array, first: Array, keys: tuple[Array, Any],
    results: CellKernelGradients, sums: CellKernelSums, settings: StateKernelSettings,
) -> None:  # fmt: skip
    """Writes the gradients of this block's tokens, to which the next block has contributed.

    The gradients of the tokens before this block are kept in VMEM for the next step.
    """
    window = keys[1].shape[0]
    raw = keys if settings.normalize_qk else None, None
    both = zip(
        sums.attended, sums.from_next_block, (results.keys, results.values), raw, strict=True
    )
    for total, from_next_block, (cached, own), known in both:
        end = total.shape[0] - window
        d_before = total[end - window : end]
        d_own = total[end:] + jnp.where(last, 0, from_next_block[head])
        if settings.null_keys:
            d_before = jax.lax.select(seen, d_before, jnp.zeros_like(d_before))
        from_next_block[head] = d_before
        if known is not None:
            d_own = l2_normalize_rows_backward(known[1][...], d_own)[0]
        own[...] = d_own.astype(own.dtype)

        @pl.when(first)
        def _write_cached(
            d_before: Array = d_before, known: Any = known, cached: Any = cached
        ) -> None:
            if known is not None:
                d_before = l2_normalize_rows_backward(known[0], d_before)[0]
            cached[...] = d_before.astype(cached.dtype)
