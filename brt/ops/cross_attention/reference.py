"""Cross-attention in which every query reads every segment and takes one of the results."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.attention import reference
from brt.ops.cross_attention.config import CrossConfig
from brt.ops.cross_attention.parameters import CrossInputs
from brt.ops.cross_attention.recurrence import (
    NeuronMetrics,
    RecurrenceParameters,
    leak_and_threshold,
)
from brt.ops.cross_attention.segments import SegmentWindows, reading_positions, segment_index
from brt.ops.cross_attention.windows import build_windows


def attend(
    inputs: CrossInputs,
    config: CrossConfig,
    *,
    t0: int | Int[Array, ""],
    target_length: int | None,
    dropout: None = None,
) -> tuple[Float[Array, "B T H K"], NeuronMetrics]:
    queries, p = inputs.queries, inputs.parameters.raf
    windows = build_windows(*inputs[1:], config)
    states, aux = _states(windows, p, config)
    t = t0 + jnp.arange(queries.shape[1])
    index = segment_index(t, windows.counts, reading_positions(config, target_length))
    y = jnp.zeros_like(queries)
    for i in range(windows.keys.shape[0]):
        own = _attend_to_segment(queries, windows, i, states, p, config)
        y = jnp.where((index == i)[:, :, None, None], own, y)
    return y, aux


def _states(
    windows: SegmentWindows, p: RecurrenceParameters, config: CrossConfig
) -> tuple[list[Float[Array, "B H K K"]], NeuronMetrics]:
    """Returns the state R of each segment ([] without a recurrence), and metrics of neurons."""
    if config.kind != "srformer":
        return [], NeuronMetrics()
    wide = jnp.promote_types(windows.keys.dtype, jnp.float32)
    keys, values = (x.astype(wide) for x in (windows.keys, windows.values))

    def clip(sums: Float[Array, "*B K K"]) -> Float[Array, "*B K K"]:
        return jnp.clip(sums, -config.clamp, config.clamp) if config.clamp else sums

    sums = jnp.einsum("mbhsc,mbhse->mbhce", keys, values)
    states = clip(sums)
    if config.kv_source != "segment":
        states = clip(jnp.sum(sums, axis=0))[None] - states
    aux = NeuronMetrics()
    if config.use_raf:
        states, aux = _run_neurons(states, windows.counts, p, config)
    if config.norm == "feature":
        norm = jnp.sqrt(jnp.sum(keys**2, axis=(0, 3)) + config.norm_epsilon**2)
        states = states / norm[None, :, :, None]
    return list(states), aux


def _run_neurons(
    inputs: Float[Array, "M B H K K"],
    counts: Int[Array, " B"],
    p: RecurrenceParameters,
    config: CrossConfig,
) -> tuple[Float[Array, "M B H K K"], NeuronMetrics]:
    """Returns the outputs of the neurons (SRformer, section 3.3) for each segment, and metrics."""
    leak, threshold = leak_and_threshold(p)
    membrane, outputs, rates = jnp.zeros_like(inputs[0]), [], []
    for j, x in enumerate(inputs):
        membrane = leak * membrane + jnp.matmul(x, p.kernel)
        y = membrane / threshold - 1
        membrane = membrane - threshold * (y > 0)
        outputs.append(jax.nn.relu(y))
        rates.append(jnp.where(j < counts, jnp.mean(y > 0, axis=(1, 2, 3)), 0))
    return jnp.stack(outputs), NeuronMetrics(jnp.mean(sum(rates) / counts), leak, threshold)


def _attend_to_segment(
    q: Float[Array, "B T H K"],
    windows: SegmentWindows,
    i: int,
    states: list[Array],
    p: RecurrenceParameters,
    config: CrossConfig,
) -> Float[Array, "B T H K"]:
    recurrent = None
    if states:
        recurrent = jnp.einsum("bthc,bhce->bthe", q, states[i].astype(q.dtype))
        if not config.use_segment:
            return recurrent
    keys, values, mask = windows.keys[i], windows.values[i], windows.mask[i]
    if windows.shared is not None:
        pairs = zip((keys, values, mask), windows.shared, (2, 2, 1), strict=True)
        keys, values, mask = (jnp.concatenate([own, more], axis) for own, more, axis in pairs)
    by_token = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    attended = reference.attend(q, *by_token, None, mask[:, None]).output
    if recurrent is None:
        return attended
    if p.sigma is not None:
        return p.sigma * attended + (1 - p.sigma) * recurrent
    return attended + recurrent if p.gate is None else attended + p.gate * recurrent
