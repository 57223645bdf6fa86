"""Cross-attention of a decoder to its source. The setting `CrossAttention.kind` selects the kind.

The source is divided into segments, and each target position reads one of them.

  full: softmax over the complete source, as a single window of all keys.
  segmented: softmax over one segment of the source.
  srformer: as segmented, plus a recurrence over the other segments, whose states pass through
    accumulate-and-fire neurons.
  xl_memory: softmax over one segment and the outputs of an RNN for the previous segment.
  transformer_xl: softmax over one segment and the previous segment.
  local_global: softmax over one segment and the means of all segments.

In shapes, B is the number of sources, T of target positions, X of source positions, N of beams.
"""

from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention import reference, xla
from brt.ops.cross_attention.parameters import CrossParameters
from brt.ops.cross_attention.xla import build_windows
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.segmented_recurrent_attention import DecodingCache as CrossCache
from brt.ops.segmented_recurrent_attention import NeuronMetrics as NeuronMetrics
from brt.ops.segmented_recurrent_attention.config import CrossConfig


def _kernel_refusal(
    queries: Array, keys: Array, values: Array, valid: Array, parameters: CrossParameters,
    config: CrossConfig, **__: Any,
) -> str | None:  # fmt: skip
    _, length, heads, width = keys.shape
    return segmented.refusal(config, heads, width, -(-length // config.segment_size), keys.dtype)


def _gpu_refusal(
    queries: Array, keys: Array, values: Array, valid: Array, parameters: CrossParameters,
    config: CrossConfig, **__: Any,
) -> str | None:  # fmt: skip
    size, length = config.segment_size, keys.shape[1]
    padded = length if config.kind == "full" else -(-length // size) * size
    return segmented.gpu_refusal(config, queries, padded)


OP = Op(
    "cross_attention",
    (
        Implementation(
            "pallas_tpu", partial(xla.attend, implementation="pallas_tpu"),
            ("tpu",), ("tpu",), _kernel_refusal,
        ),
        Implementation(
            "pallas_gpu", partial(xla.attend, implementation="pallas_gpu"),
            ("gpu",), ("gpu",), _gpu_refusal,
        ),
        Implementation("xla", xla.attend),
        Implementation("reference", reference.attend, auto=(), refusal=dispatch.dropout_refusal),
    ),
)  # fmt: skip


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
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], NeuronMetrics]:
    """Returns the attention output of the T target positions from t0 on, and metrics.

    The metrics describe the neurons of `srformer`; they are None for other kinds. Training uses
    this function. Decoding uses `prefill` and `step`.

    Args:
      queries: already multiplied by any scale.
      valid: False for padding, which no softmax reads; a source without valid positions gives zeros
        if `config.mask_kv`. Without this setting, as in the original code's T5, padding counts in
        recurrences and in means of segments.
      t0: 0 in training. If t0 is an array, the computation costs as much as full attention.
      target_length: the number of target positions of the padded batch, among which the setting
        `index_mode = "batch"` distributes the segments; None in decoding.
    """
    return dispatch.run(
        OP, implementation, queries, keys, values, valid, parameters, config,
        t0=t0, target_length=target_length, dropout=dropout,
    )  # fmt: skip


def prefill(
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: CrossParameters,
    config: CrossConfig,
) -> CrossCache:
    """Returns the cache that decoding reads by `step`, shared by all beams of a source."""
    windows = build_windows(keys, values, valid, parameters, config)
    return segmented.prefill(windows, parameters.raf, config)


def advance(cache: CrossCache, t: int | Int[Array, ""], config: CrossConfig) -> CrossCache:
    """Returns the cache for decoding steps at target position t and later.

    t must not decrease from call to call. Only `srformer` with `cache = "carry"` changes its cache,
    which holds the state of the recurrence at one position.
    """
    return segmented.advance(cache, t, config)


def step(
    queries: Float[Array, "B N T H K"],
    cache: CrossCache,
    t: int | Int[Array, ""],
    config: CrossConfig,
) -> Float[Array, "B N T H K"]:
    """Returns the result of `attend` for T target positions from t on, for all beams.

    The cache, from `prefill` or `advance`, is for position t. If beams are reordered, it stays as
    it is, because all beams of a source share it.
    """
    return segmented.step(queries, cache, t, config)
