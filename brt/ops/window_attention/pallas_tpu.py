"""Window attention by the attention kernels for TPUs, which read two blocks of W keys at once.

The kernels keep the keys and values of two blocks on the chip, so they support only windows up to a
certain length. A longer window is split into sub-windows of S keys. If keys and values are delayed
by a multiple of S places, the keys of a sub-window become the nearest S keys of a query. The
log-sum-exps tell how to combine the outputs. In shapes, the segment has D parts, and documents
start only at starts of parts.
"""

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.attention import tpu_call
from brt.ops.attention.tpu import Interpret
from brt.ops.attention.tpu_call import SlabArguments
from brt.ops.attention.tpu_kernels import HIDDEN, SlabSettings
from brt.ops.partial_attention import AttentionPart, merge_parts
from brt.ops.tpu import LANES, head_refusal, vmem_limit, vmem_refusal
from brt.ops.window_attention.inputs import WindowInputs, bias_band

# A sub-tile of a window has this many queries. With 64 or 256, the compiler's schedules of
# instructions are longer.
_ROWS = 128
_LONGEST_WINDOW = 2048  # Longer windows are split into sub-windows.
_LEAST_SUBWINDOW = 512  # No window is split into shorter sub-windows than this.


def refusal(inputs: WindowInputs) -> str | None:
    """Returns why the kernels do not support these inputs, or None if they do."""
    queries, window, drops = inputs.queries, inputs.window, inputs.dropout is not None
    if not kernel_window(queries, window, drops=drops):
        return _whole_window_refusal(queries, window, drops)
    # No document may start inside of a tile of queries.
    if inputs.part % LANES:
        return f"reads blocks of a multiple of {LANES}, not of {inputs.part}"
    return None


def kernel_window(queries: Float[Array, "B T H K"], window: int, *, drops: bool) -> int:
    """Returns the number of keys that the kernels read at once, or 0 if they refuse the inputs.

    These are the keys of the window or of a sub-window. A window with dropout is not split.
    """
    if _whole_window_refusal(queries, window, drops) is None:
        return window
    sizes = [] if drops else [window // n for n in range(2, window // _LEAST_SUBWINDOW + 1)]
    fits = (
        n for n in sizes if window % n == 0 and _whole_window_refusal(queries, n, False) is None
    )
    return next(fits, 0)


def _whole_window_refusal(queries: Array, window: int, drops: bool) -> str | None:
    tokens, width, itemsize = queries.shape[1], queries.shape[-1], queries.dtype.itemsize
    if window % LANES or window > _LONGEST_WINDOW:
        return (
            f"reads windows of a multiple of {LANES} tokens, at most {_LONGEST_WINDOW} at once, "
            f"not of {window}"
        )
    if reason := head_refusal(queries):
        return reason
    if tokens % window:
        return f"reads segments of a multiple of the window of {window} tokens, not of {tokens}"
    # VMEM has two buffers for each block, sums of gradients, and arrays of the size of the logits.
    wide = max(width, LANES)
    taken = 2 * 13 * window * wide * itemsize + 4 * window * wide * 4
    taken += 12 * (window + _ROWS) * _ROWS * 4
    taken += 2 * window * window // 8 if drops else 0
    if reason := vmem_refusal(taken, limit=vmem_limit()):
        return f"{reason} for a window of {window} with heads of {width} in {queries.dtype}"
    return None


def window_attention(
    inputs: WindowInputs, *, attend_to_self: bool, interpret: Interpret = False
) -> AttentionPart:
    """Implements `api.local_attention`; `inputs.dropout` is None or a `DropoutMask`.

    T is a multiple of W or, if the window is split, of the length of a sub-window. If `interpret`
    is True, the kernels run on any device, slowly, and with windows of any size.
    """
    window, dropout = inputs.window, inputs.dropout
    if not interpret:
        size = kernel_window(inputs.queries, window, drops=dropout is not None)
        if size < window:
            attend = functools.partial(window_attention, attend_to_self=attend_to_self)
            return attend_to_subwindows(attend, size, inputs)
    rows = math.gcd(window, _ROWS) if window % _ROWS == 0 else window
    if inputs.part % window:
        rows = math.gcd(rows, inputs.part)
    batch, _, heads, width = inputs.queries.shape
    settings = SlabSettings(
        width, 1, window, rows, rows, window=window, part=inputs.part, interpret=interpret,
        normalizes_keys=inputs.scale is not None, learns_bias=inputs.bias is not None,
        kept_rows=batch,
    )  # fmt: skip
    words = None
    if dropout is not None:
        settings = settings._replace(rate=1 - 1 / dropout.scale)
        words = dropout.packed_words()
    arrays = inputs.queries, inputs.keys, inputs.values, *inputs.cached
    q, k, v, *before = (x.swapaxes(1, 2) for x in arrays)
    bias = jnp.zeros((heads, window), jnp.float32) if inputs.bias is None else inputs.bias
    nearest = 0 if attend_to_self else 1
    tile = bias_band(bias, rows, window + rows, nearest=nearest, hidden=HIDDEN).swapaxes(1, 2)
    arguments = SlabArguments(
        q, (before[0], k), (before[1], v), tile, None, words, inputs.scale, inputs.first
    )
    y, lse = tpu_call.attend(arguments, settings)
    return AttentionPart(y, lse.swapaxes(1, 2))


interpreted = functools.partial(window_attention, interpret=True)


def attend_to_subwindows(
    attend: functools.partial[AttentionPart], size: int, inputs: WindowInputs
) -> AttentionPart:
    """Returns window attention, merged from calls of `attend` for sub-windows of `size` keys.

    If a token sees no key, its log-sum-exp is `softmax.FLOOR` plus the logarithm of the number of
    sub-windows. Because keys are delayed, `attend` may get a place `first` that lies after a token.
    This token then sees no key of the sub-window.
    """
    window, tokens, bias = inputs.window, inputs.keys.shape[1], inputs.bias
    pairs = zip(inputs.cached, (inputs.keys, inputs.values), strict=True)
    joined = [jnp.concatenate(pair, axis=1) for pair in pairs]
    results = []
    for delay in range(0, window, size):
        begin = window - delay
        keys, values = (x[:, begin : begin + tokens] for x in joined)
        part = inputs._replace(
            cached=tuple(x[:, begin - size : begin] for x in joined), keys=keys, values=values,
            bias=None if bias is None else bias[:, delay : delay + size],
        )  # fmt: skip
        if delay:
            part = part._replace(first=_delayed(inputs.first, inputs.part, size, delay))
        results.append(attend(part))
    merged = merge_parts(results)
    return AttentionPart(merged.output.astype(inputs.values.dtype), merged.lse)


def _delayed(first: Int[Array, "B D"], part: int, size: int, delay: int) -> Int[Array, "B D2"]:
    """Returns `WindowInputs.first` for keys delayed by `delay` places.

    The result is for D2 parts, which are the given parts of `part` tokens or shorter ones.
    """
    # If parts consist of whole blocks of `size` tokens, the kernel can hide the previous block only
    # as a whole. This suffices only if the document of a query starts no later than the query's
    # block. With delayed keys, the document may start in a later block, so the segment is split
    # into parts of half a block. With such parts, the kernel compares the place of every key with
    # the start of the document.
    if part % size == 0:
        first = jnp.repeat(first, 2 * part // size, axis=1)
    return first + delay
