"""Cross-attention of a decoder to its source. The setting `CrossAttention.kind` selects the kind.

The source is divided into segments, and each target position reads one of them.

  full: softmax over the complete source, as a single window of all keys.
  segmented: softmax over one segment of the source.
  srformer: as segmented, plus a recurrence over the other segments, whose states pass through
    accumulate-and-fire neurons (SRformer, section 3): O[t] = softmax(Q[t] K_i^T) V_i + Q[t] R_i /
    norm(K), where i is the segment of t, and the state R_i summarizes the other segments.
  xl_memory: softmax over one segment and the outputs of an RNN for the previous segment.
  transformer_xl: softmax over one segment and the previous segment.
  local_global: softmax over one segment and the means of all segments.

In shapes, there are B sources, T target positions, X source positions, and N beams.
"""

from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.attention import gpu
from brt.ops.attention.gpu_inputs import TILE
from brt.ops.cross_attention import pallas_tpu, reference, states_tpu, xla
from brt.ops.cross_attention.config import CrossConfig
from brt.ops.cross_attention.dense import SegmentKernels
from brt.ops.cross_attention.parameters import CrossInputs, CrossParameters
from brt.ops.cross_attention.recurrence import NeuronMetrics
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.tpu import LANES


def _tpu_refusal(inputs: CrossInputs, config: CrossConfig, **_: Any) -> str | None:
    length, heads, width = inputs.keys.shape[1:]
    segments = -(-length // config.segment_size)
    return pallas_tpu.refusal(config, heads, width, segments, inputs.keys.dtype)


def _gpu_refusal(inputs: CrossInputs, config: CrossConfig, **_: Any) -> str | None:
    kinds = "full", "segmented", "srformer"
    if config.kind not in kinds or not config.use_segment or config.training_form == "slots":
        return (
            "is the softmax attention (use_segment) of CrossAttention.kind = 'full', 'segmented' "
            "or 'srformer', not in the form 'slots'"
        )
    size, length = config.segment_size, inputs.keys.shape[1]
    padded = length if config.kind == "full" else -(-length // size) * size
    return gpu.refusal(inputs.queries, inputs.queries.shape[1], padded)


def _interpreter_refusal(inputs: CrossInputs, config: CrossConfig, **_: Any) -> str | None:
    return pallas_tpu.feature_refusal(config)


_TPU = SegmentKernels(states_tpu.read_states, LANES, states_tpu.MOST_QUERIES, pallas_tpu.recurrence)
_INTERPRETED = _TPU._replace(
    read_states=states_tpu.interpreted, unit=1, recur=pallas_tpu.interpreted
)
OP = Op(
    "cross_attention",
    (
        Implementation("pallas_tpu", partial(xla.attend, kernels=_TPU), _tpu_refusal),
        Implementation(
            "pallas_gpu", partial(xla.attend, kernels=SegmentKernels(unit=TILE)), _gpu_refusal
        ),
        Implementation("xla", xla.attend),
        Implementation(
            "pallas_interpret", partial(xla.attend, kernels=_INTERPRETED), _interpreter_refusal
        ),
        Implementation("reference", reference.attend, dispatch.dropout_refusal),
    ),
)


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

    The metrics describe the neurons of `srformer`. For other kinds, they are None. Training uses
    this function. Decoding uses `prefill` and `step`.

    Args:
      queries: already multiplied by any scale.
      valid: False for padding, which no softmax reads. A source without valid positions gives
        zeros, unless `config.counts_padding` includes padding in recurrences and means of segments.
      t0: 0 in training. If t0 is an array, every query is multiplied with the keys of all segments,
        because the segment of a query is not known at trace time.
      target_length: the number of target positions of the padded batch, over which the segments are
        distributed if `config.counts_padding` is True. None in decoding, where they are distributed
        over `config.q_ref` positions.
    """
    inputs = CrossInputs(queries, keys, values, valid, parameters)
    options = {"t0": t0, "target_length": target_length, "dropout": dropout}
    return dispatch.run(OP, implementation, inputs, config, **options)
