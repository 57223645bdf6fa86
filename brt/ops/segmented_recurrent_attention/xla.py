"""All target positions of a batch at once, in plain XLA.

dense  every query beside every window, all but its own masked: as much as full attention
slots  only what counts. A source of m <= M segments has each of them M // m times, so that
       all sources of a batch fill the same M rows; the queries of a segment are gathered into
       the slots of its rows, G a row. Never keys or values for a query.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from brt.config import CrossAttention
from brt.ops import dispatch
from brt.ops.dropout import Dropout
from brt.ops.segmented_recurrent_attention.recurrence import (
    Aux,
    Parameters,
    Recurrence,
    effective,
    recurrence,
)
from brt.ops.segmented_recurrent_attention.segments import Pace, pace, segment_index
from brt.ops.segmented_recurrent_attention.windows import (
    Windows,
    mixed,
    read_window,
    with_shared,
)


def attend(
    queries: Float[Array, "B T H K"],
    windows: Windows,
    parameters: Parameters,
    config: CrossAttention,
    *,
    t0: int | Int[Array, ""] = 0,
    target_length: int | None = None,
    dropout: Dropout | None = None,
    recur: Callable[..., Recurrence] = recurrence,
) -> tuple[Float[Array, "B T H K"], Aux]:
    """See `api.attend`.

    Args:
      recur: what computes the recurrence.
    """
    aux, recurrent = Aux(), None
    if config.kind == "srformer":
        recurrent = recur(windows.keys, windows.values, windows.counts, parameters, config)
        if config.use_raf:
            aux = Aux(recurrent.firing_rate, *effective(parameters, config))
    y = _read_own(
        queries, windows, recurrent, parameters.sigma, config,
        t0=t0, pace=pace(config, target_length), dropout=dropout,
    )  # fmt: skip
    return y, aux


def _read_own(
    queries: Float[Array, "B T H K"],
    windows: Windows,
    recurrence: Recurrence | None,
    sigma: Float[Array, ""] | None,
    config: CrossAttention,
    *,
    t0: int | Int[Array, ""],
    pace: Pace,
    dropout: Dropout | None,
) -> Float[Array, "B T H K"]:
    """Every query its own segment, in the form that `config.training_form` names."""
    count, length = windows.keys.shape[0], queries.shape[1]
    form = config.training_form
    if not isinstance(t0, int):
        form = "dense"  # how many queries share a segment is not known
    elif count == 1:
        form = "slots"
    elif form == "auto":
        form = "slots" if 2 * row_size(count, length, t0, pace) <= length else "dense"
    if form == "dense":
        return _dense(queries, windows, recurrence, sigma, config, t0, pace, dropout)
    return _slots(queries, windows, recurrence, sigma, config, t0, pace, dropout)


def row_size(count: int, length: int, t0: int, pace: Pace) -> int:
    """G: slots of a row that do for every source of at most `count` segments."""

    def needed(segments: int) -> int:
        stay = min(pace.longest_stay(segments, t0 + length), length)
        return -(-stay // (count // segments))

    return max(needed(segments) for segments in range(1, count + 1))


class Plan(NamedTuple):
    """Where the queries of each source are read.

    Attributes:
      segment: that a row holds.
      held: the query in each of Y = M * G slots, some one where a slot is idle.
      slot: of each query.
    """

    segment: Int[Array, "B M"]
    held: Int[Array, "B Y"]
    slot: Int[Array, "B T"]


def plan(counts: Int[Array, " B"], rows: int, length: int, t0: int, pace: Pace) -> Plan:
    """Gives each segment of a source rows // count rows, and its queries slots in them."""
    size, each = row_size(rows, length, t0, pace), counts[:, None]
    repeats, row = rows // each, jnp.arange(rows, dtype=jnp.int32)[None]
    segment = jnp.minimum(row // repeats, each - 1)
    # Positions count from t0; segments that were read before it have nothing left.
    first = jnp.maximum(pace.start(segment, each) - t0, 0) + (row - segment * repeats) * size
    held = first[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    held = jnp.minimum(held, length - 1).reshape(first.shape[0], -1)
    position = jnp.arange(length, dtype=jnp.int32)
    own = segment_index(position + t0, counts, pace)
    since = position[None] - jnp.maximum(pace.start(own, each) - t0, 0)
    return Plan(segment, held, own * repeats * size + since)


def _slots(
    queries: Float[Array, "B T H K"],
    windows: Windows,
    recurrence: Recurrence | None,
    sigma: Float[Array, ""] | None,
    config: CrossAttention,
    t0: int,
    pace: Pace,
    dropout: Dropout | None,
) -> Float[Array, "B T H K"]:
    batch, length, heads, width = queries.shape
    count = windows.keys.shape[0]
    if count > 1:
        segment, held, slot = plan(windows.counts, count, length, t0, pace)
        queries = _moved(queries, held, slot)
        if config.segment_count == "per_example":  # else every row holds its own segment
            keys, values, mask = (
                _repeated(x, segment) for x in (windows.keys, windows.values, windows.mask)
            )
            windows = windows._replace(keys=keys, values=values, mask=mask)
            if recurrence is not None:
                states = _repeated(recurrence.states, segment)
                recurrence = recurrence._replace(states=states)
    rows = queries.reshape(batch, count, -1, heads, width).transpose(1, 0, 3, 2, 4)
    y = _read(rows, windows, recurrence, sigma, config, dropout)
    y = y.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)
    return _moved(y, slot, held) if count > 1 else y


def _repeated(x: Shaped[Array, "M B *R"], segment: Int[Array, "B M"]) -> Shaped[Array, "M B *R"]:
    """Row r of each source: that of its segment[r].

    Sources stay where they are, behind the rows and on their device; under `vmap` they would
    be moved to the front and back. TPUs gather them one by one, in twenty times the time of a
    product with zeros and ones, which is as exact.
    """
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


def _read(
    rows: Float[Array, "M B H G K"],
    windows: Windows,
    recurrence: Recurrence | None,
    sigma: Float[Array, ""] | None,
    config: CrossAttention,
    dropout: Dropout | None,
) -> Float[Array, "M B H G K"]:
    """Row j reads window j."""
    attended = recurrent = None
    if config.use_segment:
        window = with_shared(*windows[:3], windows.shared, axis=0)
        attended = read_window(rows, *window, dropout, lanes=1)
    if recurrence is not None:
        states, scale, _ = recurrence
        recurrent = jnp.einsum("mbhgc,mbhce->mbhge", rows, states)
        if scale is not None:
            recurrent = recurrent * scale[None].astype(rows.dtype)
    return mixed(attended, recurrent, sigma)


@jax.custom_vjp
def _moved(
    x: Float[Array, "B I H K"], source: Int[Array, "B O"], target: Int[Array, "B I"]
) -> Float[Array, "B O H K"]:
    """Row source[o] of x in row o. Only row target[i] is anyone's to read, of those that hold i.

    So the gradient is a gather as well; scattering row by row is slow on CPUs.
    """
    return _rows(x, source)


def _rows(x: Shaped[Array, "B I *R"], indices: Int[Array, "B O"]) -> Shaped[Array, "B O *R"]:
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, indices)


def _moved_forward(x: Array, source: Array, target: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows(x, source), (source, target)


def _moved_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    source, target = residuals
    used = _rows(source, target) == jnp.arange(target.shape[1])[None]
    return jnp.where(used[:, :, None, None], _rows(gradient, target), 0), None, None


_moved.defvjp(_moved_forward, _moved_backward)


def _dense(
    queries: Float[Array, "B T H K"],
    windows: Windows,
    recurrence: Recurrence | None,
    sigma: Float[Array, ""] | None,
    config: CrossAttention,
    t0: int | Int[Array, ""],
    pace: Pace,
    dropout: Dropout | None,
) -> Float[Array, "B T H K"]:
    batch, length, heads, width = queries.shape
    count, size = windows.keys.shape[0], windows.keys.shape[3]
    by_head = queries.swapaxes(1, 2)
    own = segment_index(t0 + jnp.arange(length, dtype=jnp.int32), windows.counts, pace)
    mine = own[:, :, None] == jnp.arange(count)[None, None]  # [B, T, M]
    attended = recurrent = None
    if config.use_segment:
        keys, values = (
            jnp.moveaxis(x, 0, 2).reshape(batch, heads, -1, width)
            for x in (windows.keys, windows.values)
        )
        mask = mine[:, :, :, None] & jnp.moveaxis(windows.mask, 0, 1)[:, None]
        mask = mask.reshape(batch, length, count * size)
        if windows.shared is not None:
            keys = jnp.concatenate([keys, windows.shared.keys], axis=2)
            values = jnp.concatenate([values, windows.shared.values], axis=2)
            shared = windows.shared.mask[:, None]
            shared = jnp.broadcast_to(shared, (batch, length, shared.shape[-1]))
            mask = jnp.concatenate([mask, shared], axis=2)
        attended = read_window(by_head, keys, values, mask, dropout)
    if recurrence is not None:
        states, scale, _ = recurrence
        spread = jnp.where(mine[:, None, :, :, None], by_head[:, :, :, None], 0)  # [B, H, T, M, K]
        states = jnp.moveaxis(states, 0, 2).reshape(batch, heads, count * width, width)
        recurrent = jnp.matmul(spread.reshape(batch, heads, length, -1), states)
        if scale is not None:
            recurrent = recurrent * scale.astype(queries.dtype)
    return mixed(attended, recurrent, sigma).swapaxes(1, 2)
