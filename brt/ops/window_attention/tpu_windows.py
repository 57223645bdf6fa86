"""The windows that the TPU kernels of window attention support.

The kernels read a window as a whole, or split into sub-windows of equal length (`subwindows`).
"""

from typing import Any

from jaxtyping import Array, Float

from brt.ops.tpu import LANES, vmem_limit, vmem_refusal
from brt.ops.window_attention.limits import Limits

MOST_ROWS = 128  # A tile has at most this many rows; with 64 or 256, schedules are longer.
_LIMITS = Limits((128, 256, 512, 1024, 2048), (64, 128, 256), ("float32", "bfloat16"))
_LEAST_SUBWINDOW = 512  # No window is split into shorter sub-windows than this.


def refusal(
    queries: Float[Array, "B T H K"],
    cached: tuple[Array, Array],
    keys: Array,
    values: Array,
    bias: Array | None,
    cache_mask: Array,
    dropout: Any = None,
    *,
    null_keys: bool = False,
    **_: Any,
) -> str | None:
    """Returns the reason why the kernels do not support these inputs, or None if they do.

    In the place of `cache_mask`, callers may pass `first` of `pallas_tpu.window_attention`.
    """
    window, drops = cached[0].shape[1], dropout is not None
    if kernel_window(queries, window, drops=drops, null_keys=null_keys):
        return None
    return _whole_window_refusal(queries, window, drops)


def kernel_window(
    queries: Float[Array, "B T H K"], window: int, *, drops: bool, null_keys: bool
) -> int:
    """Returns the number of keys that the kernels read at once, or 0 if they refuse the inputs.

    These are the keys of the window or of a sub-window. A window with dropout (`drops`) or with
    null keys is not split.
    """
    if _whole_window_refusal(queries, window, drops) is None:
        return window
    if drops or null_keys:
        return 0
    for size in reversed(_LIMITS.windows):
        divides = window % size == 0 and _LEAST_SUBWINDOW <= size < window
        if divides and _whole_window_refusal(queries, size, drops) is None:
            return size
    return 0


def _whole_window_refusal(queries: Array, window: int, drops: bool) -> str | None:
    if reason := _LIMITS.refusal(queries, window):
        return reason
    tokens, width = queries.shape[1], queries.shape[-1]
    if tokens % window:
        return f"reads segments of a multiple of the window of {window} tokens, not of {tokens}"
    taken = _backward_vmem_bytes(window, max(width, LANES), queries.dtype.itemsize, drops)
    if reason := vmem_refusal(taken, most=vmem_limit()):
        return f"{reason} for a window of {window} with heads of {width} in {queries.dtype}"
    return None


def _backward_vmem_bytes(window: int, width: int, itemsize: int, drops: bool) -> int:
    # There are two buffers for each block, the sums, and arrays of the size of the logits.
    blocks, sums = 2 * 13 * window * width * itemsize, 4 * window * width * 4
    dropout = 2 * window * window // 8 if drops else 0
    return blocks + sums + 14 * window * MOST_ROWS * 4 + dropout
