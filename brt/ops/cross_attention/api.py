"""Cross-attention of a decoder to its source. The setting `CrossAttention.kind` selects the kind.

The source is divided into segments, and each target position reads one of them.

  full: softmax over the complete source, as a single window of all keys.
  segmented: softmax over one segment of the source.
  srformer: as segmented, plus a recurrence over the other segments, whose states pass through
    accumulate-and-fire neurons.
  xl_memory: softmax over one segment and the outputs of an RNN for the previous segment.
  transformer_xl: softmax over one segment and the previous segment.
  local_global: softmax over one segment and the means of all segments.

In shapes, B is the number of sources, T of target positions, X of source positions, N of beams of a
source, H of heads, and K of numbers of a head.
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
    return segmented.gpu_refusal(config, config.segment_size, keys.shape[3], keys.dtype)


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

    Training uses this function. Decoding uses `prefill` and `step`.

    Args:
      queries: already multiplied by any scale.
      keys, values: projections of the encoder's output. Padding is not read, except if
        `config.mask_kv` is False, as in the original code's T5. Padding then counts in recurrences
        and in the means of segments, but no softmax reads the keys of padding themselves.
      valid: False for padding. If `config.mask_kv` is True, the softmax of a source without valid
        positions gives zeros.
      parameters: learned parameters of the kind of cross-attention.
      config: settings of cross-attention.
      t0: the target position of the first query, 0 in training. If t0 is an array, the computation
        costs as much as full attention.
      target_length: the number of target positions of the padded batch, among which the setting
        `index_mode = "batch"` distributes the segments; None in decoding.
      dropout: dropout of the softmax weights; None for no dropout.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The outputs in the dtype of the keys, with softmax and recurrence in float32; and metrics of
        the neurons of `srformer`, all of which are None for other kinds.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
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
    """Returns the cache of the keys and values of a source, which decoding reads by `step`.

    All beams of a source share one cache.

    Args:
      keys, values: projections of the encoder's output.
      valid: False for padding.
      parameters: learned parameters of the kind of cross-attention.
      config: settings of cross-attention.
    """
    windows = build_windows(keys, values, valid, parameters, config)
    return segmented.prefill(windows, parameters.raf, config)


def advance(cache: CrossCache, t: int | Int[Array, ""], config: CrossConfig) -> CrossCache:
    """Returns the cache for decoding steps at target position t and later.

    Only the kind `srformer` with the setting `cache = "carry"` changes its cache, because this
    cache holds the state of the recurrence at one position.

    Args:
      cache: the cache from `prefill` or from an earlier call of `advance`.
      t: the target position, which must not decrease from call to call.
      config: settings of cross-attention.
    """
    return segmented.advance(cache, t, config)


def step(
    queries: Float[Array, "B N T H K"],
    cache: CrossCache,
    t: int | Int[Array, ""],
    config: CrossConfig,
) -> Float[Array, "B N T H K"]:
    """Returns the attention output of T target positions, from position t on, for the N beams of
    every source.

    This is a step of decoding. The result equals the result of `attend` at these positions. If
    beams are reordered, the cache stays as it is, because all beams of a source share the cache.

    Args:
      queries: queries of each beam, already multiplied by any scale.
      cache: the cache for position t, from `prefill` or `advance`.
      t: the target position of the first query.
      config: settings of cross-attention.
    """
    return segmented.step(queries, cache, t, config)
