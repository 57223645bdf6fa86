"""What the kernel of the whole cell takes."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from brt.distributed import rules
from brt.ops.dispatch import AUTO
from brt.ops.recurrent_attention.cell import CellWeights
from brt.ops.tpu import LANES, cores, room


def refuses(
    weights: CellWeights,
    initial: Array,
    vectors: Array,
    cached: tuple[Array, Array],
    keys: Array,
    *_: Any,
    kind: str = "",
    taps: PyTree[Array] = None,
    attention: str | None = None,
    **__: Any,
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    (lanes, states, dim), (window, heads, width) = vectors.shape, cached[0].shape[1:]
    if attention not in (None, AUTO):
        return f"attends by itself, not by Kernels.softmax_attention = {attention!r}"
    if kind != "fixed" or weights.output is None or weights.mlp_in is not None:
        return "has the gate 'fixed' and the layout 'skip' only"
    if taps is not None:
        return "takes all blocks of a segment at once, not a block of a loop over them"
    if states % LANES or window % LANES or dim % LANES:
        return (
            f"takes a multiple of 128 states, of 128 tokens and of 128 numbers a vector, not "
            f"{states}, {window} and {dim}"
        )
    if width not in (128, 256) or keys.dtype not in (jnp.float32, jnp.bfloat16):
        return f"has heads of 128 or 256 in float32 or bfloat16, not of {width} in {keys.dtype}"
    if rules.count("heads", heads) > 1:
        return "has all heads on one device"
    here = lanes // rules.count("lanes", lanes)
    if here % cores():
        return f"has sequences for each of {cores()} cores of a chip, not {here} of them"
    if (taken := _bytes(states, window, dim, heads, width, keys.dtype.itemsize)) > room():
        return f"keeps states on the chip, {room() >> 20} MiB of it at most, not {taken >> 20}"
    return None


def _bytes(states: int, window: int, dim: int, heads: int, width: int, itemsize: int) -> int:
    """Of VMEM that the backward pass takes: two of each block, its sums, a tile of logits."""
    vectors, slots = states * dim * 4, states + 2 * window
    blocks = 2 * (6 * vectors + itemsize * (states * dim + 6 * dim * width))
    by_head = 2 * width * itemsize * (12 * states + 10 * window)
    sums = 3 * vectors + 2 * width * (states * itemsize + 4 * slots + 4 * heads * window)
    return blocks + by_head + sums + 5 * max(states, 2 * window) * min(256, states) * 4
