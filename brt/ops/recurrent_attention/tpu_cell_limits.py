"""A check whether the TPU kernel of the complete recurrent cell supports given inputs.

In shapes, B is the number of rows of the batch, S of states with D numbers, H of heads with K
numbers, T of tokens of a segment, and W of tokens of a block.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from brt.distributed import rules
from brt.ops.dispatch import AUTO
from brt.ops.recurrent_attention.cell import CellWeights
from brt.ops.recurrent_attention.tpu_kernels import ROWS
from brt.ops.tpu import LANES, cores_per_chip, vmem_refusal


def refusal(
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
    """Returns the reason why the kernel of the complete cell does not support these arguments of
    `state_scan`, or None if it does.

    Args:
      weights: the cell's weights, whose fields show the layout of the cell.
      initial: [S, D], the learned states at the start of a document.
      vectors: [B, S, D], the states before the segment.
      cached: keys and values [B, W, H, K] of the tokens of the block before the segment.
      keys: [B, T, H, K], keys of the tokens of the segment.
      kind: the kind of gate; only 'fixed' is supported.
      taps: not None if the caller scans over blocks itself and computes weight gradients after the
        scan, which the kernel does not support.
      attention: the name of the implementation of attention that the caller asks for. The kernel
        computes attention itself, so only None and "auto" are supported.
      *_, **__: the other arguments of `state_scan`, all of which the kernel supports.
    """
    (lanes, states, dim), (window, heads, width) = vectors.shape, cached[0].shape[1:]
    if attention not in (None, AUTO):
        return f"attends by itself, not by {attention!r} of softmax_attention"
    if (kind, layout := _layout(weights)) != ("fixed", "skip"):
        return f"has the gate 'fixed' in the layout 'skip' only, not {kind!r} in {layout!r}"
    if taps is not None:
        return "takes all blocks of a segment at once, not a block of a loop over them"
    if states % LANES or window % LANES or dim % LANES:
        return (
            f"takes a multiple of 128 states, of 128 tokens and of 128 numbers a vector, not "
            f"{states}, {window} and {dim}"
        )
    if width not in (128, 256) or keys.dtype not in (jnp.float32, jnp.bfloat16):
        return f"has heads of 128 or 256 in float32 or bfloat16, not of {width} in {keys.dtype}"
    if (sharing := rules.shard_count("heads", heads)) > 1:
        return f"has all heads on one device, not on {sharing} that share them (Mesh.tensor)"
    local_lanes = lanes // rules.shard_count("lanes", lanes)
    if local_lanes % (cores := cores_per_chip()):
        return f"has sequences for each of {cores} cores of a chip, not {local_lanes} of them"
    return vmem_refusal(
        _backward_vmem_bytes(states, window, dim, heads, width, keys.dtype.itemsize), "states"
    )


def _layout(weights: CellWeights) -> str:
    if weights.output is None:
        return "single"
    return "skip" if weights.mlp_in is None else "dual"


def _backward_vmem_bytes(
    states: int, window: int, dim: int, heads: int, width: int, itemsize: int
) -> int:
    """Returns the bytes of VMEM that the backward pass needs.

    These are two buffers for each block, the sums, a tile of logits, and both factors and the
    result of the last product, the product with all four projections.
    """
    vectors, slots = states * dim * 4, states + 2 * window
    blocks = 2 * (6 * vectors + itemsize * (states * dim + 6 * dim * width))
    by_head = 2 * width * itemsize * (12 * states + 10 * window)
    sums = 3 * vectors + 2 * width * (states * itemsize + 4 * slots + 4 * heads * window)
    tile = 5 * max(states, 2 * window) * min(ROWS, states) * 4
    joined = 4 * width * itemsize * (states + dim) + vectors
    return blocks + by_head + sums + tile + joined
