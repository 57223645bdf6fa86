"""Segmented recurrent attention (SRformer, section 3).

A target position attends to one segment of the source by softmax, and to all other segments by
linear attention, whose states pass through accumulate-and-fire neurons:

    O[t] = softmax(Q[t] K_i^T) V_i + Q[t] R_i / norm(K), where i is the segment of t

K_i and V_i are the keys and values of segment i, and the state R_i summarizes the other segments.
In shapes, B is the number of sources, T of target positions, and N of beams of a source.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops import dispatch
from brt.ops.attention import gpu
from brt.ops.attention.gpu_inputs import TILE
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.segmented_recurrent_attention import (
    cache,
    pallas_tpu,
    reference,
    states_tpu,
    xla,
)
from brt.ops.segmented_recurrent_attention.cache import DecodingCache as DecodingCache
from brt.ops.segmented_recurrent_attention.config import CrossConfig
from brt.ops.segmented_recurrent_attention.dense import DenseKernels, read_states
from brt.ops.segmented_recurrent_attention.recurrence import NeuronMetrics as NeuronMetrics
from brt.ops.segmented_recurrent_attention.recurrence import (
    RecurrenceParameters as RecurrenceParameters,
)
from brt.ops.segmented_recurrent_attention.windows import SegmentWindows as SegmentWindows
from brt.ops.segmented_recurrent_attention.windows import SharedKeys as SharedKeys
from brt.ops.tpu import LANES


def gpu_refusal(config: CrossConfig, queries: Float[Array, "B T H K"], keys: int) -> str | None:
    """Returns why the GPU's kernel for softmax does not support these settings or sizes, or None.

    `keys` is the number of keys of all windows.
    """
    kinds = "full", "segmented", "srformer"
    if config.kind not in kinds or not config.use_segment or config.training_form == "slots":
        return (
            "is the softmax attention (use_segment) of CrossAttention.kind = 'full', 'segmented' "
            "or 'srformer', not in the form 'slots'"
        )
    return gpu.refusal(queries, queries.shape[1], keys)


def _kernel_refusal(
    queries: Array,
    windows: SegmentWindows,
    parameters: RecurrenceParameters,
    config: CrossConfig,
    **__: Any,
) -> str | None:
    segments, _, heads, _, width = windows.keys.shape
    return pallas_tpu.refusal(config, heads, width, segments, windows.keys.dtype)


def _gpu_refusal(
    queries: Array,
    windows: SegmentWindows,
    parameters: RecurrenceParameters,
    config: CrossConfig,
    **__: Any,
) -> str | None:
    return gpu_refusal(config, queries, windows.keys.shape[0] * windows.keys.shape[3])


OP = Op(
    "segmented_recurrent_attention",
    (
        Implementation(
            "pallas_tpu",
            partial(
                xla.attend,
                recur=pallas_tpu.recurrence,
                kernels=DenseKernels(states_tpu.read_states, LANES, states_tpu.MOST_QUERIES),
            ),
            ("tpu",), ("tpu",), _kernel_refusal,
        ),
        Implementation(
            "pallas_gpu",
            partial(xla.attend, kernels=DenseKernels(read_states, TILE)),
            ("gpu",), ("gpu",), _gpu_refusal,
        ),
        Implementation("xla", xla.attend),
        Implementation(
            "pallas_interpret",
            partial(
                xla.attend,
                recur=pallas_tpu.interpreted,
                kernels=DenseKernels(states_tpu.interpreted, 1, states_tpu.MOST_QUERIES),
            ),
            (),
            refusal=lambda _, windows, parameters, config, **__: pallas_tpu.feature_refusal(config),
        ),
        Implementation("reference", reference.attend, auto=(), refusal=dispatch.dropout_refusal),
    ),
)  # fmt: skip


def attend(
    queries: Float[Array, "B T H K"],
    windows: SegmentWindows,
    parameters: RecurrenceParameters,
    config: CrossConfig,
    *,
    t0: int | Int[Array, ""] = 0,
    target_length: int | None = None,
    dropout: Dropout | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], NeuronMetrics]:
    """Returns the attention of the T target positions from t0 on, and metrics of the neurons.

    Args:
      queries: already multiplied by any scale.
      t0: if it is an array, every query is multiplied with the keys of all segments, because its
        segment is not known at trace time.
      target_length: the number of target positions of the padded batch, over which
        `config.index_mode = "batch"` distributes the segments. None in decoding, where
        `config.q_ref` takes its place.
    """
    return dispatch.run(
        OP, implementation, queries, windows, parameters, config,
        t0=t0, target_length=target_length, dropout=dropout,
    )  # fmt: skip


def prefill(
    windows: SegmentWindows, parameters: RecurrenceParameters, config: CrossConfig
) -> DecodingCache:
    """Returns the cache that `step` reads in decoding, in the form that `config.cache` selects."""
    return cache.prefill(windows, parameters, config)


def advance(cache_: DecodingCache, t: int | Int[Array, ""], config: CrossConfig) -> DecodingCache:
    """Returns the cache with its neurons advanced to the segment that target position t reads.

    The function `step` also advances the neurons but does not return them, so without `advance`
    every step does it again. t must not decrease from call to call.
    """
    return cache.advance(cache_, jnp.asarray(t, jnp.int32), config)


def step(
    queries: Float[Array, "B N T H K"],
    cache_: DecodingCache,
    t: int | Int[Array, ""],
    config: CrossConfig,
) -> Float[Array, "B N T H K"]:
    """Returns the attention of T target positions, from t on, for N beams of every source.

    The result equals that of `attend` with t0 = t and no target length. Beams share the cache.
    """
    return cache.step(queries, cache_, jnp.asarray(t, jnp.int32), config)
