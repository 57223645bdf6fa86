"""Cross-attention in plain XLA: it builds the windows for segmented recurrent attention."""

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
    """Returns, for all segments, the keys and values that the targets of a segment read."""
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
