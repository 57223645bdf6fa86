"""Cross-attention of all target positions of a batch, in plain XLA or with kernels.

Attention is computed in one of two forms:

  dense: every query is multiplied with the windows of all segments (see the module `dense`). With
    kernels, this is faster than the other form, which copies windows and states.
  slots: every query is multiplied with the window of its own segment only. For this, the queries of
    a source are sorted into M rows, and all queries of a row read the same segment. A row has G
    places for queries, its slots. A source of m <= M segments has M // m rows for each of its
    segments, and the last segment also has the remaining rows. Keys are never gathered for single
    queries.

In shapes, M is the largest number of segments of a source, and S the number of keys of a window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from brt.ops import dispatch
from brt.ops.cross_attention.config import CrossConfig
from brt.ops.cross_attention.dense import SegmentKernels, attend_densely
from brt.ops.cross_attention.parameters import CrossInputs
from brt.ops.cross_attention.recurrence import NeuronMetrics, leak_and_threshold, recurrence
from brt.ops.cross_attention.segments import (
    first_position,
    most_positions,
    reading_positions,
    segment_index,
)
from brt.ops.cross_attention.windows import (
    Source,
    attend_to_window,
    build_windows,
    combine_outputs,
    with_shared,
)
from brt.ops.dropout import Dropout


def attend(
    inputs: CrossInputs,
    config: CrossConfig,
    *,
    t0: int | Int[Array, ""],
    target_length: int | None,
    dropout: Dropout | None,
    kernels: SegmentKernels | None = None,
) -> tuple[Float[Array, "B T H K"], NeuronMetrics]:
    """Implements `api.attend`; if `kernels` can be used, the form "auto" means "dense"."""
    queries, learned = inputs.queries, inputs.parameters.raf
    windows = build_windows(*inputs[1:], config)
    source, aux = Source(windows, config.use_segment, sigma=learned.sigma), NeuronMetrics()
    if config.kind == "srformer":
        recur = recurrence if kernels is None else kernels.recur
        states = recur(windows.keys, windows.values, windows.counts, learned, config)
        source = source._replace(recurrence=states)
        if config.use_raf:
            aux = NeuronMetrics(states.firing_rate, *leak_and_threshold(learned))
    count, length = windows.keys.shape[0], queries.shape[1]
    if kernels is not None and not kernels.support(length, count * windows.keys.shape[3]):
        kernels = None
    q = reading_positions(config, target_length)
    if _is_dense(config.training_form, kernels, count, length, t0, q):
        own = segment_index(t0 + jnp.arange(length, dtype=jnp.int32), windows.counts, q)
        return attend_densely(queries, source, own, dropout, kernels), aux
    by_row = not config.counts_padding
    return _attend_by_slots(queries, source, t0, q, dropout, by_row), aux


def _is_dense(
    form: str, kernels: SegmentKernels | None, count: int, length: int, t0: int | Array,
    q: int,
) -> bool:  # fmt: skip
    # The form with slots is impossible if t0 is an array: the number of slots of a row depends on
    # the value of t0, which is not known at trace time.
    if not isinstance(t0, int) or (form == "auto" and kernels is not None):
        return True
    if count == 1:
        return False
    if form == "auto":
        return 2 * slots_per_row(count, length, t0, q) > length
    return form == "dense"


def slots_per_row(count: int, length: int, t0: int, q: int) -> int:
    """Returns G, the number of slots that a row needs if sources have 1 to `count` segments."""

    # These are the largest number of queries of a segment, divided by its number of rows.
    def needed_slots(segments: int) -> int:
        stay = min(most_positions(segments, t0 + length, q), length)
        return -(-stay // (count // segments))

    return max(needed_slots(segments) for segments in range(1, count + 1))


class SlotAssignment(NamedTuple):
    """The assignment of the queries of each source to Y = M * G slots, G for each of M rows."""

    segment: Int[Array, "B M"]  # the segment that each row reads
    query_of_slot: Int[Array, "B Y"]  # the query of each slot; an arbitrary one for unused slots
    slot: Int[Array, "B T"]  # the slot of each query


def plan_slots(counts: Int[Array, " B"], rows: int, length: int, t0: int, q: int) -> SlotAssignment:
    """Assigns the queries of each segment to slots of its rows (see the module's docstring)."""
    size, each = slots_per_row(rows, length, t0, q), counts[:, None]
    repeats, row = rows // each, jnp.arange(rows, dtype=jnp.int32)[None]
    segment = jnp.minimum(row // repeats, each - 1)
    # `first` is the index of the query in the first slot of each row. Only target positions from t0
    # on have queries, so the position of the first query that reads the segment is reduced by t0.
    first = jnp.maximum(first_position(segment, each, q) - t0, 0) + (row - segment * repeats) * size
    query_of_slot = first[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    query_of_slot = jnp.minimum(query_of_slot, length - 1).reshape(first.shape[0], -1)
    position = jnp.arange(length, dtype=jnp.int32)
    own = segment_index(position + t0, counts, q)
    since = position[None] - jnp.maximum(first_position(own, each, q) - t0, 0)
    return SlotAssignment(segment, query_of_slot, own * repeats * size + since)


def _attend_by_slots(
    queries: Float[Array, "B T H K"],
    source: Source,
    t0: int,
    q: int,
    dropout: Dropout | None,
    by_row: bool,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every query.

    If `by_row` is False, every source has M segments. Row r then reads segment r, so none is
    repeated.
    """
    batch, length, heads, width = queries.shape
    windows, recurrence = source.windows, source.recurrence
    count = windows.keys.shape[0]
    if count > 1:
        segment, query_of_slot, slot = plan_slots(windows.counts, count, length, t0, q)
        queries = _gather_once(queries, query_of_slot, slot)
        if by_row:
            keys, values, mask = (_repeat_segments(x, segment) for x in windows[:3])
            source = source._replace(windows=windows._replace(keys=keys, values=values, mask=mask))
            if recurrence is not None:
                states = _repeat_segments(recurrence.states, segment)
                source = source._replace(recurrence=recurrence._replace(states=states))
    rows = queries.reshape(batch, count, -1, heads, width).transpose(1, 0, 3, 2, 4)
    y = _attend_rows(rows, source, dropout)
    y = y.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)
    return _gather_once(y, slot, query_of_slot) if count > 1 else y


def _repeat_segments(
    x: Shaped[Array, "M B *R"], segment: Int[Array, "B M"]
) -> Shaped[Array, "M B *R"]:
    """Returns x for rows instead of segments: row r of a source has the entries of segment[r]."""
    # TPUs gather row by row, which takes twenty times as long as an exact product with zeros and
    # ones. In both cases, the axis of sources stays the second one, so that sources stay on their
    # devices. `vmap` would move this axis.
    if dispatch.policy().gathers_by_product:
        ones = jax.nn.one_hot(segment, len(x), dtype=jnp.promote_types(x.dtype, jnp.bfloat16))
        results = jnp.einsum("bom,mb...->ob...", ones, x.astype(ones.dtype), precision="highest")
        return results.astype(x.dtype)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(2, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,),
        operand_batching_dims=(1,), start_indices_batching_dims=(1,),
    )  # fmt: skip
    return jax.lax.gather(
        x, segment.T[:, :, None], numbers, (1, 1, *x.shape[2:]), mode="promise_in_bounds"
    )


def _attend_rows(
    rows: Float[Array, "M B H G K"], source: Source, dropout: Dropout | None
) -> Float[Array, "M B H G K"]:
    attended = recurrent = scale = None
    if source.use_segment:
        window = with_shared(*source.windows[:3], source.windows.shared, axis=0)
        attended = attend_to_window(rows, *window, dropout, lanes=1)
    if source.recurrence is not None:
        states, scale, _ = source.recurrence
        recurrent = jnp.einsum("mbhgc,mbhce->mbhge", rows, states)
        scale = None if scale is None else scale[None]
    return combine_outputs(attended, recurrent, scale, source.sigma)


@jax.custom_vjp
def _gather_once(
    x: Float[Array, "B I H K"], source: Int[Array, "B O"], target: Int[Array, "B I"]
) -> Float[Array, "B O H K"]:
    """Returns y, an array of O rows, whose row o is row source[o] of the I rows of x.

    Several rows of y may hold row i of x, but callers read only row target[i] of y. The gradient is
    therefore a gather, too; a scatter of single rows is slow on CPUs.
    """
    return _gather_rows(x, source)


def _gather_rows(x: Shaped[Array, "B I *R"], indices: Int[Array, "B O"]) -> Shaped[Array, "B O *R"]:
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, indices)


def _gather_once_backward(
    residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, None, None]:
    source, target = residuals
    used = _gather_rows(source, target) == jnp.arange(target.shape[1])[None]
    return jnp.where(used[:, :, None, None], _gather_rows(gradient, target), 0), None, None


_gather_once.defvjp(lambda x, *places: (_gather_rows(x, places[0]), places), _gather_once_backward)
