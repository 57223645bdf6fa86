"""The blocks of arrays that a step of the TPU kernels of window attention reads.

In shapes, G is the number of heads of keys and values, and N of blocks of a segment.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from brt.ops.window_attention.tpu_arrays import WindowBlocks, WindowKernelInputs


def block_specs(
    inputs: WindowKernelInputs, blocks: int, *, reverse: bool = False
) -> WindowKernelInputs:
    """Returns the block specs of the inputs, of a segment of `blocks` blocks.

    If `reverse`, the steps of a segment go from its last block to its first.
    """

    def block_index(n: Array) -> Array:
        return blocks - 1 - n if reverse else n

    # Step n of a segment reads block `place(n)` of x, [B, H, T, K] for queries or [B, G, T, K].
    def block_spec(x: Array, place: Callable[[Array], Array]) -> pl.BlockSpec:
        window, members = inputs.q.shape[2] // blocks, inputs.q.shape[1] // x.shape[1]
        shape = (None, None, window, x.shape[3])

        # The operator // is not used, because it has code for negative numbers that kernels do not
        # support.
        def key_head(h: Array) -> Array:
            return h if members == 1 else jax.lax.div(h, jnp.int32(members))

        return pl.BlockSpec(shape, lambda h, b, n, _: (b, key_head(h), place(n), 0))

    # Each step reads the row vector of its block from x [B, H, N, 1, W].
    def row_spec(x: Array | None) -> pl.BlockSpec | None:
        if x is None:
            return None
        return pl.BlockSpec(
            (None, None, None, *x.shape[3:]), lambda h, b, n, _: (b, h, block_index(n), 0, 0)
        )

    def window_specs(x: WindowBlocks) -> WindowBlocks:
        return WindowBlocks(
            block_spec(x.cached, jnp.zeros_like),
            block_spec(x.before, lambda n: jnp.maximum(block_index(n) - 1, 0)),
            block_spec(x.own, block_index),
        )

    return WindowKernelInputs(
        block_spec(inputs.q, block_index), window_specs(inputs.keys), window_specs(inputs.values),
        head_spec(inputs.scale), head_spec(inputs.tile), head_spec(inputs.dropout),
        None if inputs.gradient is None else block_spec(inputs.gradient, block_index),
        row_spec(inputs.lse), row_spec(inputs.along),
    )  # fmt: skip


def head_spec(x: Any) -> pl.BlockSpec | None:
    """Returns the spec of a block that all steps of a head share."""
    if x is None:
        return None
    return pl.BlockSpec((None, *x.shape[1:]), lambda h, b, n, _: (h, *(0 for _ in x.shape[1:])))
