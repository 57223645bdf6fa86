"""Cross-attention by the reference implementation of segmented recurrent attention.

The windows, the keys and values that a segment's targets read, are built in a simple way.
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
