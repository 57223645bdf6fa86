"""Cross-attention of every kind; `CrossAttention.kind` chooses.

full          softmax over the whole source: the case of one window of all keys
segmented     softmax over one segment of the source
srformer      the same beside a recurrence over the other segments
xl_memory     softmax over one segment and a memory of the one before
local_global  softmax over one segment and the means of all segments
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import CrossAttention
from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention import baselines
from brt.ops.cross_attention.parameters import Parameters
from brt.ops.dropout import Dropout
from brt.ops.segmented_recurrent_attention import Aux as Aux
from brt.ops.segmented_recurrent_attention import Cache as CrossCache
from brt.ops.segmented_recurrent_attention.segments import cut, segment_counts


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: Parameters,
    config: CrossAttention,
    *,
    t0: int | Int[Array, ""] = 0,
    target_length: int | None = None,
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B T H K"], Aux]:
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

    Returns:
      In the dtype of the keys, with softmax and recurrence in float32; and what to log.
    """
    windows = _windows(keys, values, valid, parameters, config)
    return segmented.attend(
        queries, windows, parameters.raf, config,
        t0=t0, target_length=target_length, dropout=dropout,
    )  # fmt: skip


def prefill(
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: Parameters,
    config: CrossAttention,
) -> CrossCache:
    """All that `step` reads, made once for each source, whatever the number of its beams."""
    windows = _windows(keys, values, valid, parameters, config)
    return segmented.prefill(windows, parameters.raf, config)


def advance(cache: CrossCache, t: int | Int[Array, ""], config: CrossAttention) -> CrossCache:
    """The cache for steps at t and later, see `segmented_recurrent_attention.advance`.

    Only `srformer` with `cache = "carry"` has anything to do; `t` must not decrease.
    """
    return segmented.advance(cache, t, config)


def step(
    queries: Float[Array, "B N T H K"],
    cache: CrossCache,
    t: int | Int[Array, ""],
    config: CrossAttention,
) -> Float[Array, "B N T H K"]:
    """Target positions t to t + T of the N beams of every source; the same as `attend`.

    The cache does not know of beams, so none of it moves when beams are reordered.
    """
    return segmented.step(queries, cache, t, config)


def _windows(
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: Parameters,
    config: CrossAttention,
) -> segmented.Windows:
    if config.mask_kv:
        keys, values = (jnp.where(valid[:, :, None, None], x, 0) for x in (keys, values))
    size = keys.shape[1] if config.kind == "full" else config.segment_size
    own_keys, own_values = (cut(x, size).swapaxes(2, 3) for x in (keys, values))
    counts = segment_counts(valid, config, size)
    windows = segmented.Windows(own_keys, own_values, cut(valid, size), counts)
    if config.kind == "local_global":
        counted = windows.usable if config.mask_kv else jnp.ones_like(windows.usable)
        return windows._replace(shared=baselines.segment_means(own_keys, own_values, counted))
    if config.kind == "xl_memory":
        return _with_memory(windows, keys, values, parameters, config)
    return windows


def _with_memory(
    windows: segmented.Windows,
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    parameters: Parameters,
    config: CrossAttention,
) -> segmented.Windows:
    memories, recurs = (None, None), config.memory == "rnn"
    if recurs:
        weights = (parameters.memory_keys, parameters.memory_values)
        memories = (
            cut(baselines.rnn(x, w), config.segment_size).swapaxes(2, 3)
            for x, w in zip((keys, values), weights, strict=True)
        )
    both = map(baselines.with_previous, (windows.keys, windows.values), memories)
    usable = baselines.previous_usable(windows.usable, first=recurs)
    return segmented.Windows(*both, usable, windows.counts)
