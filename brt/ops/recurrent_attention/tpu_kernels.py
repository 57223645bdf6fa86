"""Bodies of the TPU kernels of the states' attention, for one head and one row of the batch.

The module `pallas_tpu` describes the algorithm. The states attend to each other and to the tokens
of two blocks. Matrices of logits are keys x states.

In shapes, B is the number of rows of the batch, S the number of states, W the number of tokens of a
block, and K the size of a head. A tile has R states, which see X keys.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops.softmax import MASKED
from brt.ops.tpu import (
    LANES,
    NN,
    NT,
    TN,
    dot_float32,
    l2_normalize_rows,
    l2_normalize_rows_backward,
)

# These are the indices of the parts of `StateKernelInputs.projected`. The queries at index 1 attend
# to states, and the queries at index 2 attend to tokens.
KEYS, QUERIES, VALUES = 0, (1, 2), 3
# The kernels process the queries of the states in tiles of at most this many rows. With this
# number, the compiler generates the shortest schedules of instructions.
ROWS = 256


class StateKernelSettings(NamedTuple):
    """Static settings of the kernels."""

    normalize_qk: bool
    # If the previous block may not be read, True sets its keys and values to zero, and they still
    # take part in the softmax. False leaves them out of the softmax.
    null_keys: bool
    interpret: bool | pltpu.InterpretParams


class StateKernelInputs(NamedTuple):
    """Inputs of a step of the grid (one head and row of the batch), or their block specs."""

    # [4, S, K], four projections of the states, before normalization: keys, queries that read
    # states, queries that read tokens, and values.
    projected: Any
    # [2, 128], two numbers, each repeated 128 times: one for the queries that read states, and one
    # for the queries that read tokens. Each number is the length to which the queries are
    # normalized. Without normalization, it is the factor by which the queries are multiplied.
    scales: Any
    # [W, K] each: first those of the previous block's tokens, then those of this block's tokens.
    keys: tuple[Any, Any]
    values: tuple[Any, Any]
    # [2, S, K], the gradient of `StateKernelOutputs.y`. This field and the following ones are None
    # in the forward pass.
    gradient: Any = None
    # [S, K] each, the parts of the gradients of the states' keys and values that come from the
    # tokens, because tokens read these keys and values, too.
    d_states: tuple[Any, Any] | None = None
    # The outputs and the log-sum-exp of the forward pass, as in `StateKernelOutputs`.
    y: Any = None
    lse: Any = None


class StateKernelOutputs(NamedTuple):
    """Outputs of a step of the grid, or their block specs."""

    # [2, S, K], outputs of attention to states and to tokens.
    y: Any
    # [S, K], keys of the states, which the tokens read, too; normalized if
    # `StateKernelSettings.normalize_qk` is True.
    keys: Any
    # [2, 1, S], the log-sum-exp of attention to states and of attention to tokens.
    lse: Any


class StateKernelGradients(NamedTuple):
    """Gradients of the fields of `StateKernelInputs` with the same names, or their block specs.

    Each step of the grid overwrites all fields except `scales`.
    """

    projected: Any
    # A sum over all rows of the batch, to which each step adds its contribution.
    scales: Any
    keys: tuple[Any, Any]
    values: tuple[Any, Any]


class _KeyPart(NamedTuple):
    """Some of the keys that queries see, and their values, [X, K] each."""

    keys: Array
    values: Array
    # This float32 number is added to the logits: `MASKED` hides the keys, 0 shows them.
    unseen: Array | float = 0.0


def _key_parts(
    seen: Array, inputs: StateKernelInputs, settings: StateKernelSettings
) -> tuple[list[_KeyPart], list[_KeyPart]]:
    """Returns the keys and values that states see: first those of states, then those of tokens.

    `seen` is True if the previous block may be read.
    """
    keys, (before, own) = inputs.projected[KEYS], zip(inputs.keys, inputs.values, strict=True)
    if settings.normalize_qk:
        keys = l2_normalize_rows(keys)[0].astype(keys.dtype)
    known, own_pair = ([x[...] for x in pair] for pair in (before, own))
    if settings.normalize_qk:
        known[0], own_pair[0] = (
            l2_normalize_rows(x)[0].astype(x.dtype) for x in (known[0], own_pair[0])
        )
    unseen = jnp.where(seen, 0.0, MASKED)
    if settings.null_keys:
        known = [jax.lax.select(seen, x, jnp.zeros_like(x)) for x in known]
        unseen = jnp.zeros(())
    tokens = [_KeyPart(known[0], known[1], unseen), _KeyPart(own_pair[0], own_pair[1])]
    return [_KeyPart(keys, inputs.projected[VALUES])], tokens


def _scaled_queries(
    which: int, rows: slice, inputs: StateKernelInputs, settings: StateKernelSettings
) -> Float[Array, "R K"]:
    own = inputs.projected[QUERIES[which], rows]
    wide = l2_normalize_rows(own)[0] if settings.normalize_qk else own.astype(jnp.float32)
    return (wide * inputs.scales[which : which + 1, :1]).astype(own.dtype)


def _products(arrays: Iterator[Array], x: Float[Array, "R K"]) -> Float[Array, "X R"]:
    return jnp.concatenate([dot_float32(one, x, NT) for one in arrays], axis=0)


def _logits(parts: list[_KeyPart], own: Float[Array, "R K"]) -> Float[Array, "X R"]:
    results = [dot_float32(part.keys, own, NT) + part.unseen for part in parts]
    return jnp.concatenate(results, axis=0)


def _split_by_part(x: Float[Array, "X R"], parts: list[_KeyPart]) -> list[Array]:
    """Splits x, which has a row for each key, into one array for the keys of each part."""
    ends = [sum(len(part.keys) for part in parts[:i]) for i in range(len(parts) + 1)]
    return [x[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def _row_tiles(states: int) -> list[slice]:
    rows = math.gcd(states, ROWS)
    return [slice(i, i + rows) for i in range(0, states, rows)]


def forward_kernel(
    cache_mask: Any,
    inputs: StateKernelInputs,
    outputs: StateKernelOutputs,
    *,
    settings: StateKernelSettings,
) -> None:
    """Computes attention of the states to states and to the tokens of two blocks.

    Args:
      cache_mask: [B], not zero for rows of the batch that may read the previous block.
      inputs, outputs: references to the arrays of the step.
    """
    attentions = _key_parts(cache_mask[pl.program_id(1)] > 0, inputs, settings)
    outputs.keys[...] = attentions[0][0].keys
    for which, parts in enumerate(attentions):
        tiles, softmax = _row_tiles(outputs.keys.shape[0]), []
        # The weights of all tiles are computed before the first product with the values. The
        # softmax of a tile can then be computed while the matrix units compute the logits of the
        # next tile.
        for rows in tiles:
            logits = _logits(parts, _scaled_queries(which, rows, inputs, settings))
            top = jnp.max(logits, axis=0, keepdims=True)
            weights = jnp.exp(logits - top)
            total = jnp.sum(weights, axis=0, keepdims=True)
            softmax.append((weights.astype(parts[0].values.dtype), top, total))
        columns = [part.values.T for part in parts]
        for rows, (weights, top, total) in zip(tiles, softmax, strict=True):
            pairs = zip(columns, _split_by_part(weights, parts), strict=True)
            sums = sum(dot_float32(column, part, NN) for column, part in pairs)
            outputs.y[which, rows] = (sums / total).T.astype(outputs.y.dtype)
            outputs.lse[which, :, rows] = top + jnp.log(total)


def backward_kernel(
    cache_mask: Any,
    inputs: StateKernelInputs,
    results: StateKernelGradients,
    keys_sum: Any,
    values_sum: Any,
    *,
    settings: StateKernelSettings,
) -> None:
    """Computes the gradients of both attentions.

    Args:
      cache_mask: as for `forward_kernel`.
      inputs, results: references to the arrays of the step, and to the gradients to be written.
      keys_sum, values_sum: [S + 2 W, K], float32 scratch memory for the gradients of all keys and
        of all values, in the order: states, previous block's tokens, this block's tokens.
    """
    lane = pl.program_id(1)

    @pl.when(lane == 0)
    def _clear_scales() -> None:
        results.scales[...] = jnp.zeros_like(results.scales)

    seen = cache_mask[lane] > 0
    sums = keys_sum, values_sum
    _write_state_gradients(seen, inputs, results, sums, settings)
    _write_token_gradients(seen, inputs, results, sums, settings)


def _write_state_gradients(
    seen: Array,
    inputs: StateKernelInputs,
    results: StateKernelGradients,
    sums: tuple[Any, Any],
    settings: StateKernelSettings,
) -> None:
    """Writes the fields `projected` and `scales` of `results`, and `sums`.

    Args:
      seen: True if the previous block may be read.
      sums: float32 [S + 2 W, K] each, overwritten with the gradients of the keys and of the values
        that the states attend to: S rows for the states, W rows for the previous block's tokens,
        and W rows for this block's tokens. These sums do not contain `inputs.d_states`.
    """
    attentions = _key_parts(seen, inputs, settings)
    states = results.projected.shape[1]
    places = slice(0, states), slice(states, None)
    for which, (parts, place) in enumerate(zip(attentions, places, strict=True)):
        for rows in _row_tiles(states):
            gradients = _add_gradients(which, rows, parts, inputs, results, settings)
            for total, gradient_part in zip(sums, gradients, strict=True):
                total[place] = gradient_part + total[place] if rows.start else gradient_part
    pairs = zip(sums, inputs.d_states or (), strict=True)
    # Tokens read the states' keys and values, too; `d_states` has the gradients from the tokens.
    state_gradients = [total[:states] + d_states[...] for total, d_states in pairs]
    if settings.normalize_qk:
        d_keys = state_gradients[0]
        state_gradients[0] = l2_normalize_rows_backward(inputs.projected[KEYS], d_keys)[0]
    for part, gradient in zip((KEYS, VALUES), state_gradients, strict=True):
        results.projected[part] = gradient.astype(results.projected.dtype)


def _write_token_gradients(
    seen: Array,
    inputs: StateKernelInputs,
    results: StateKernelGradients,
    sums: tuple[Any, Any],
    settings: StateKernelSettings,
) -> None:
    window = results.keys[0].shape[0]
    raw = inputs.keys if settings.normalize_qk else None, None
    for (before, own), total, keys in zip((results.keys, results.values), sums, raw, strict=True):
        end = total.shape[0] - window
        d_before, own_pair = total[end - window : end], total[end:]
        if settings.null_keys:
            d_before = jax.lax.select(seen, d_before, jnp.zeros_like(d_before))
        if keys is not None:
            pairs = zip(keys, (d_before, own_pair), strict=True)
            d_before, own_pair = (
                l2_normalize_rows_backward(x[...], gradient)[0] for x, gradient in pairs
            )
        before[...] = d_before.astype(before.dtype)
        own[...] = own_pair.astype(own.dtype)


def _add_gradients(
    which: int,
    rows: slice,
    parts: list[_KeyPart],
    inputs: StateKernelInputs,
    results: StateKernelGradients,
    settings: StateKernelSettings,
) -> tuple[Float[Array, "X K"], Float[Array, "X K"]]:
    """Returns the gradients of keys and values that come from the queries in `rows`.

    The function also writes the gradients of these queries, and adds to the gradient of their
    scale. `which` is 0 for attention to states and 1 for attention to tokens.
    """
    queries, d_output = _scaled_queries(which, rows, inputs, settings), inputs.gradient[which, rows]
    mean = jnp.sum(d_output.astype(jnp.float32) * inputs.y[which, rows], axis=-1, keepdims=True)
    mean = jnp.broadcast_to(mean, (len(mean), LANES)).T[:1]
    weights = jnp.exp(_logits(parts, queries) - inputs.lse[which, :, rows])
    d_logits = weights * (_products((part.values for part in parts), d_output) - mean)
    d_logits, weights = d_logits.astype(queries.dtype), weights.astype(queries.dtype)
    d_keys, d_values = dot_float32(d_logits, queries, NN), dot_float32(weights, d_output, NN)
    pairs = zip(_split_by_part(d_logits, parts), parts, strict=True)
    d_queries = sum(dot_float32(d_part, part.keys, TN) for d_part, part in pairs)
    place, scale = QUERIES[which], slice(which, which + 1)
    if settings.normalize_qk:
        d_queries, length = l2_normalize_rows_backward(inputs.projected[place, rows], d_queries)
    else:
        unscaled = inputs.projected[place, rows].astype(jnp.float32)
        length = jnp.sum(d_queries * unscaled, axis=-1, keepdims=True)
    total = jnp.sum(length, axis=0, keepdims=True)
    results.scales[scale] += jnp.broadcast_to(total, (1, LANES))
    d_queries *= inputs.scales[scale, :1]
    results.projected[place, rows] = d_queries.astype(results.projected.dtype)
    return d_keys, d_values
