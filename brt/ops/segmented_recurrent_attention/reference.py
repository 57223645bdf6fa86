"""The meaning of segmented recurrent attention: source by source, position by position."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.config import CrossAttention
from brt.ops.segmented_recurrent_attention.recurrence import Parameters, effective


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[np.ndarray, "B X"],
    parameters: Parameters,
    config: CrossAttention,
    *,
    t0: int = 0,
    target_length: int | None = None,
) -> Float[Array, "B T H K"]:
    """Kinds `segmented` and `srformer`, as `api.attend`; in float64 where that is enabled.

    `valid` is a NumPy array: Python decides what is read.
    """
    outputs = []
    for q, k, v, usable in zip(queries, keys, values, valid, strict=True):
        count = _segment_count(usable, config)
        states = _states(k, v, usable, count, parameters, config)
        rows = []
        for t in range(t0, t0 + len(q)):
            i = _index(t, count, config, target_length)
            rows.append(_row(q[t - t0], k, v, usable, i, states, parameters, config))
        outputs.append(jnp.stack(rows))
    return jnp.stack(outputs)


def _segment_count(usable: np.ndarray, config: CrossAttention) -> int:
    length = len(usable)
    if config.segment_count == "per_example":
        length = max(np.flatnonzero(usable).tolist(), default=0) + 1
    return -(-length // config.segment_size)


def _index(t: int, count: int, config: CrossAttention, target_length: int | None) -> int:
    if config.index_mode == "stride":
        return min(t // config.stride, count - 1)
    whole = target_length if config.index_mode == "batch" and target_length else config.q_ref
    return min(t * count // whole, count - 1)


def _states(
    k: Array, v: Array, usable: np.ndarray, count: int, p: Parameters, config: CrossAttention
) -> list[Float[Array, "H K K"]]:
    """R of each segment, behind its normalisation."""
    if config.kind == "segmented":
        return []
    wide = jnp.promote_types(k.dtype, jnp.float32)
    k, v = k.astype(wide), v.astype(wide)
    if config.mask_kv:
        k, v = (jnp.where(usable[:, None, None], x, 0) for x in (k, v))

    def product(part: slice) -> Float[Array, "H K K"]:
        sums = jnp.einsum("zhc,zhe->hce", k[part], v[part])
        return jnp.clip(sums, -config.clamp, config.clamp) if config.clamp else sums

    norm = jnp.ones((k.shape[1], k.shape[2]), wide)
    if config.norm == "feature":
        norm = jnp.sqrt(jnp.sum(k**2, axis=0) + config.norm_epsilon**2)
    membrane, states = jnp.zeros((k.shape[1], k.shape[2], k.shape[2]), wide), []
    for j in range(count):
        own = product(slice(j * config.segment_size, (j + 1) * config.segment_size))
        state = own if config.kv_source == "segment" else product(slice(None)) - own
        if config.use_raf:
            leak, threshold = effective(p, config)
            state = state @ p.kernel
            if p.bias is not None:
                state = state + p.bias[None, None]
            membrane = leak * membrane + state
            y = membrane / threshold - 1
            membrane = membrane - threshold * (y > 0)
            state = jax.nn.relu(y)
        states.append(state / norm[:, None, :])
    return states


def _row(
    q: Array,
    k: Array,
    v: Array,
    usable: np.ndarray,
    i: int,
    states: list[Array],
    p: Parameters,
    config: CrossAttention,
) -> Float[Array, "H K"]:
    """One position, which reads segment i."""
    recurrent = None
    if states:
        recurrent = jnp.einsum("hc,hce->he", q, states[i].astype(q.dtype))
        if not config.use_segment:
            return recurrent
    segment = np.arange(len(usable)) // config.segment_size == i
    seen = np.flatnonzero(usable & segment)
    attended = jnp.zeros_like(q)
    if len(seen):
        logits = jnp.einsum("hc,zhc->hz", q, k[seen])
        attended = jnp.einsum("hz,zhe->he", jax.nn.softmax(logits, axis=-1), v[seen])
    if recurrent is None:
        return attended
    if config.mix == "sigma":
        return p.sigma * attended + (1 - p.sigma) * recurrent
    if config.mix == "gated":
        return attended + p.gate * recurrent
    return attended + recurrent
