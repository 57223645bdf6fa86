"""Cross-attention in plain XLA.

The window of a segment is the keys and values that the targets of the segment read. This module
builds the windows, and attends to them by segmented recurrent attention.

In shapes, B is the number of sources, T of target positions, X of source positions, M of segments,
S of source positions of a segment, H of heads, and K of numbers of a head.
"""

from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention import baselines
from brt.ops.cross_attention.parameters import CrossParameters
from brt.ops.dropout import Dropout
from brt.ops.segmented_recurrent_attention.config import CrossConfig
from brt.ops.segmented_recurrent_attention.segments import segment_counts, split_segments


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: CrossParameters,
    config: CrossConfig,
    *,
    t0: int | Int[Array, ""] = 0,
    target_length: int | None = None,
    dropout: Dropout | None = None,
    implementation: str = "xla",
) -> tuple[Float[Array, "B T H K"], segmented.NeuronMetrics]:
    """Returns the attention output of the T target positions from t0 on, and metrics.

    The kind of cross-attention that is named `srformer` passes the states of a recurrence through
    accumulate-and-fire neurons. The metrics describe these neurons; for other kinds, all fields of
    the metrics are None.

    Args:
      queries: already multiplied by any scale.
      keys, values: projections of the encoder's output.
      valid: False for padding. If `config.mask_kv` is True, the softmax of a source without valid
        positions gives zeros.
      parameters: learned parameters of the kind of cross-attention.
      config: settings of cross-attention.
      t0: the target position of the first query.
      target_length: the number of target positions of the padded batch, among which the setting
        `index_mode = "batch"` distributes the segments; None in decoding.
      dropout: dropout of the softmax weights; None for no dropout.
      implementation: the implementation of segmented recurrent attention, which this function
        calls.
    """
    windows = build_windows(keys, values, valid, parameters, config)
    return segmented.attend(
        queries, windows, parameters.raf, config, t0=t0, target_length=target_length,
        dropout=dropout, implementation=implementation,
    )  # fmt: skip


def build_windows(
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: CrossParameters,
    config: CrossConfig,
) -> segmented.SegmentWindows:
    """Returns the windows of all segments: the keys and values that the targets of a segment read.

    Args:
      keys, values: projections of the encoder's output.
      valid: False for padding.
      parameters: learned parameters of the kind of cross-attention.
      config: settings of cross-attention.
    """
    if config.mask_kv:
        keys, values = (jnp.where(valid[:, :, None, None], x, 0) for x in (keys, values))
    size = keys.shape[1] if config.kind == "full" else config.segment_size
    own_keys, own_values = (split_segments(x, size).swapaxes(2, 3) for x in (keys, values))
    counts = segment_counts(valid, config, size)
    windows = segmented.SegmentWindows(own_keys, own_values, split_segments(valid, size), counts)
    if config.kind == "local_global":
        counted = windows.mask if config.mask_kv else jnp.ones_like(windows.mask)
        return windows._replace(shared=baselines.segment_means(own_keys, own_values, counted))
    if config.kind in ("xl_memory", "transformer_xl"):
        return _with_memory(windows, keys, values, parameters, config)
    return windows


def _with_memory(
    windows: segmented.SegmentWindows,
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    parameters: CrossParameters,
    config: CrossConfig,
) -> segmented.SegmentWindows:
    recurs = config.kind == "xl_memory"
    memories: Iterable[Array | None] = (None, None)
    if recurs:
        weights = (parameters.memory_keys, parameters.memory_values)
        memories = (
            split_segments(baselines.rnn(x, w), config.segment_size).swapaxes(2, 3)
            for x, w in zip((keys, values), weights, strict=True)
        )
    k, v = map(baselines.with_previous, (windows.keys, windows.values), memories)
    mask = baselines.previous_mask(windows.mask, first=recurs)
    return segmented.SegmentWindows(k, v, mask, windows.counts)
