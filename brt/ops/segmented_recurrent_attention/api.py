"""Segmented recurrent attention (SRformer, section 3).

A target position attends to one segment of the source by softmax, and to all other segments by
linear attention, whose states pass through accumulate-and-fire neurons:

    O[t] = softmax(Q[t] K_i^T) V_i + Q[t] R_i / norm(K), where i is the segment of t

K_i and V_i are the keys and values of segment i, and R_i is the state that summarizes the other
segments.

In shapes, B is the number of sources, T of target positions, N of beams of a source, H of heads,
and K of numbers of a head.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.segmented_recurrent_attention import (
    cache,
    pallas_gpu,
    pallas_tpu,
    reference,
    states_tpu,
    xla,
)
from brt.ops.segmented_recurrent_attention.cache import DecodingCache as DecodingCache
from brt.ops.segmented_recurrent_attention.config import CrossConfig
from brt.ops.segmented_recurrent_attention.dense import DenseKernels
from brt.ops.segmented_recurrent_attention.recurrence import NeuronMetrics as NeuronMetrics
from brt.ops.segmented_recurrent_attention.recurrence import (
    RecurrenceParameters as RecurrenceParameters,
)
from brt.ops.segmented_recurrent_attention.windows import SegmentWindows as SegmentWindows
from brt.ops.segmented_recurrent_attention.windows import SharedKeys as SharedKeys
from brt.ops.tpu import LANES

gpu_refusal = pallas_gpu.refusal


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
    size, width = windows.keys.shape[3:]
    return pallas_gpu.refusal(config, size, width, windows.keys.dtype)


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
            partial(xla.attend, recur=pallas_gpu.recurrence),
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
        Implementation(
            "pallas_gpu_interpret",
            partial(xla.attend, recur=pallas_gpu.interpreted),
            (),
            refusal=lambda _, windows, parameters, config, **__: pallas_gpu.feature_refusal(config),
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
    """Returns the attention output of the T target positions from t0 on, and metrics of the
    accumulate-and-fire neurons.

    Args:
      queries: already multiplied by any scale.
      windows: the keys and values that the queries of each segment read.
      parameters: the learned parameters of the recurrence.
      config: settings of cross-attention.
      t0: the first target position. If t0 is an array, every query is multiplied with the keys of
        all segments, and the keys of all segments except the query's own are masked, because the
        segments of the queries are not known at trace time.
      target_length: the number of target positions of the padded batch, over which
        `config.index_mode = "batch"` distributes the segments. None in decoding, where
        `config.q_ref` takes its place.
      dropout: dropout of the softmax weights; None for no dropout.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The output in the dtype of the keys, and numbers to log about the neurons, which are None for
        kinds of cross-attention without neurons.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    return dispatch.run(
        OP, implementation, queries, windows, parameters, config,
        t0=t0, target_length=target_length, dropout=dropout,
    )  # fmt: skip


def prefill(
    windows: SegmentWindows, parameters: RecurrenceParameters, config: CrossConfig
) -> DecodingCache:
    """Returns the cache that `step` reads in decoding, computed once for each source.

    `config.cache` selects the form of the cache. "table" stores the states R of all segments.
    "carry" stores the accumulate-and-fire neurons as they are at the current segment. "auto"
    selects the table if the table is not larger than the keys and values (S >= K / 2 for segments
    of S positions), and otherwise "carry".

    Args:
      windows: the keys and values of each segment.
      parameters: the learned parameters of the recurrence.
      config: settings of cross-attention.
    """
    return cache.prefill(windows, parameters, config)


def advance(cache_: DecodingCache, t: int | Int[Array, ""], config: CrossConfig) -> DecodingCache:
    """Returns the cache with its neurons advanced to the segment that target position t reads.

    The function `step` also advances the neurons but does not return them. Without `advance`, every
    step therefore advances the neurons again from the segment of the cache. A cache with a table of
    all states is returned unchanged.

    Args:
      cache_: the cache from `prefill` or from an earlier call of `advance`.
      t: the target position, which must not decrease from call to call.
      config: settings of cross-attention.
    """
    return cache.advance(cache_, jnp.asarray(t, jnp.int32), config)


def step(
    queries: Float[Array, "B N T H K"],
    cache_: DecodingCache,
    t: int | Int[Array, ""],
    config: CrossConfig,
) -> Float[Array, "B N T H K"]:
    """Returns the attention output of T target positions, from position t on, for N beams of every
    source.

    The result equals the result of `attend` with t0 = t. With `index_mode = "batch"`, this holds if
    `attend` is called without a target length.

    Args:
      queries: queries of each beam, already multiplied by any scale.
      cache_: the cache of each source, from `prefill` or `advance`; all beams of a source share the
        cache.
      t: the first target position.
      config: settings of cross-attention.
    """
    return cache.step(queries, cache_, jnp.asarray(t, jnp.int32), config)
