"""Cross-attention of every kind; `CrossAttention.kind` chooses.

full          softmax over the whole source: the case of one window of all keys
segmented     softmax over one segment of the source
srformer      the same beside a recurrence over the other segments
xl_memory     softmax over one segment and a memory of the one before
local_global  softmax over one segment and the means of all segments
"""

from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention import reference, xla
from brt.ops.cross_attention.parameters import Parameters
from brt.ops.cross_attention.xla import windows_of
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.segmented_recurrent_attention import DecodingCache as CrossCache
from brt.ops.segmented_recurrent_attention import NeuronMetrics as NeuronMetrics
from brt.ops.segmented_recurrent_attention.config import CrossConfig


def _kernel_refuses(
    queries: Array, keys: Array, values: Array, valid: Array, parameters: Parameters,
    config: CrossConfig, **__: Any,
) -> str | None:  # fmt: skip
    _, length, heads, width = keys.shape
    return segmented.refusal(config, heads, width, -(-length // config.segment_size), keys.dtype)


OP = Op(
    "cross_attention",
    (
        Implementation(
            "pallas_tpu", partial(xla.attend, implementation="pallas_tpu"),
            ("tpu",), ("tpu",), _kernel_refuses,
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
    parameters: Parameters,
    config: CrossConfig,
    *,
    t0: int | Int[Array, ""] = 0,
    target_length: int | None = None,
    dropout: Dropout | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], NeuronMetrics]:
    """Target positions t0 to t0 + T of every source: the form for training.

    Args:
      queries: with any scale folded in.
      keys, values: of the encoder's output, projected; what is not valid is never read
        (`mask_kv = False`: only the softmax leaves it out, as the original's T5).
      valid: False on padding; a source without valid positions gives zeros.
      t0: 0 in training. An array takes the form that costs as much as full attention.
      target_length: that of the padded batch, which `index_mode = "batch"` needs in
        training; None: as in decoding.
      dropout: of the softmax weights; None: none.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      In the dtype of the keys, with softmax and recurrence in float32; and what to log.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        OP, implementation, queries, keys, values, valid, parameters, config,
        t0=t0, target_length=target_length, dropout=dropout,
    )  # fmt: skip


def prefill(
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: Parameters,
    config: CrossConfig,
) -> CrossCache:
    """All that `step` reads, made once for each source, whatever the number of its beams."""
    windows = windows_of(keys, values, valid, parameters, config)
    return segmented.prefill(windows, parameters.raf, config)


def advance(cache: CrossCache, t: int | Int[Array, ""], config: CrossConfig) -> CrossCache:
    """The cache for steps at t and later, see `segmented_recurrent_attention.advance`.

    Only `srformer` with `cache = "carry"` has anything to do; `t` must not decrease.
    """
    return segmented.advance(cache, t, config)


def step(
    queries: Float[Array, "B N T H K"],
    cache: CrossCache,
    t: int | Int[Array, ""],
    config: CrossConfig,
) -> Float[Array, "B N T H K"]:
    """Target positions t to t + T of the N beams of every source; the same as `attend`.

    The cache does not know of beams, so none of it moves when beams are reordered.
    """
    return segmented.step(queries, cache, t, config)
