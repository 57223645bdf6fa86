"""Reference implementation of cross-attention.

The window of a segment is the keys and values that the targets of the segment read. This module
builds the windows in a simple way, and attends to them by the reference implementation of segmented
recurrent attention.

In shapes, B is the number of sources, T of target positions, X of source positions, M of segments,
S of source positions of a segment, H of heads, and K of numbers of a head.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention.baselines import RnnWeights
from brt.ops.cross_attention.parameters import CrossParameters
from brt.ops.segmented_recurrent_attention import SegmentWindows, SharedKeys
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
    dropout: None = None,
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
      dropout: None, because dropout is not supported.
    """
    windows = _windows(keys, values, valid, parameters, config)
    return segmented.attend(
        queries, windows, parameters.raf, config,
        t0=t0, target_length=target_length, implementation="reference",
    )  # fmt: skip


def _windows(
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: CrossParameters,
    config: CrossConfig,
) -> SegmentWindows:
    if config.mask_kv:
        keys, values = (jnp.where(valid[:, :, None, None], x, 0) for x in (keys, values))
    size = keys.shape[1] if config.kind == "full" else config.segment_size
    counts, mask = segment_counts(valid, config, size), split_segments(valid, size)
    k, v = (split_segments(x, size).swapaxes(2, 3) for x in (keys, values))
    if config.kind == "local_global":
        counted = mask if config.mask_kv else jnp.ones_like(mask)
        mean_k, mean_v = (
            jnp.stack([_mean(part, m) for part, m in zip(x, counted, strict=True)], axis=2)
            for x in (k, v)
        )
        return SegmentWindows(
            k, v, mask, counts, SharedKeys(mean_k, mean_v, jnp.any(counted, axis=2).T)
        )
    if config.kind not in ("xl_memory", "transformer_xl"):
        return SegmentWindows(k, v, mask, counts)
    recurs = config.kind == "xl_memory"
    before = [jax.lax.stop_gradient(x) for x in (k, v)]
    if recurs:
        pairs = (keys, parameters.memory_keys), (values, parameters.memory_values)
        before = [split_segments(_rnn(x, weights), size).swapaxes(2, 3) for x, weights in pairs]
    previous = [max(j - 1, 0) for j in range(len(mask))]
    before_mask = [mask[j] & (recurs or n > 0) for n, j in enumerate(previous)]
    mask = jnp.concatenate([jnp.stack(before_mask), mask], axis=2)
    k, v = (
        jnp.stack(
            [jnp.concatenate([x[j], own], axis=2) for j, own in zip(previous, y, strict=True)]
        )
        for x, y in zip(before, (k, v), strict=True)
    )
    return SegmentWindows(k, v, mask, counts)


def _mean(x: Float[Array, "B H S K"], counted: Bool[Array, "B S"]) -> Float[Array, "B H K"]:
    total = jnp.sum(jnp.where(counted[:, None, :, None], x, 0), axis=2)
    return total / jnp.maximum(jnp.sum(counted, axis=1), 1)[:, None, None].astype(x.dtype)


def _rnn(x: Float[Array, "B X H K"], weights: RnnWeights) -> Float[Array, "B X H K"]:
    flat, states = x.reshape(*x.shape[:2], -1), []
    h = jnp.zeros_like(flat[:, 0])
    for t in range(x.shape[1]):
        h = jnp.tanh(flat[:, t] @ weights.input_kernel + h @ weights.kernel + weights.bias[None])
        states.append(h)
    return jnp.stack(states, axis=1).reshape(x.shape)
