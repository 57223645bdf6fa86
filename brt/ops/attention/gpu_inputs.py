"""Inputs of the kernels in `gpu_kernels`, and their division into tiles.

This module does not import Mosaic GPU, so it can be imported with every version of jax. In shapes,
T is the number of queries of a row of the batch, S the number of keys of a row, H the number of
heads of queries, and G the number of heads of keys. Each head of keys serves H / G consecutive
heads of queries. I is the number of tiles of queries, and J the number of tiles of keys.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array

TILE = 64  # A tile has this many rows, as many as a warpgroup's matrix product has.
# The kernels multiply logits by this number, log2(e), and compute powers of two instead of powers
# of e, because the hardware has an instruction for powers of two.
LOG2E = 1.4426950408889634
# Vectors are split into parts of at most this many numbers, because a matrix product with longer
# vectors would spill registers.
_MAX_PART = 128
_ABOVE_ANY_TILE = 1 << 20  # This number is greater than the index of any tile.


def vector_parts(x: Array) -> int:
    """Returns the number of parts into which vectors x [..., K] are split (see `_MAX_PART`)."""
    return -(-x.shape[-1] // _MAX_PART)


def opaque_zero(n: Array) -> Array:
    """Returns zero, computed from n < 2**20 so that the compiler does not recognise a constant.

    If the compiler knows the index of an operand of a matrix product, it computes the descriptors
    of this operand for all unrolled iterations of a loop in advance and keeps the descriptors in
    registers, which the matrix products need. Callers therefore use this zero instead of the
    constant 0 as an index, or add it to an index.
    """
    return jax.lax.div(n, _ABOVE_ANY_TILE)


class KernelSettings(NamedTuple):
    """Static settings of the kernels."""

    # True if the bias depends only on the distance between a key and a query. Tile [i, j] of the
    # logits then reads tile [0, j - i] of `KernelInputs.bias`. If False, it reads tile [i, j].
    by_distance: bool
    learned: bool  # True if the bias has a gradient
    rate: float  # the rate of the dropout that is hashed from `KernelInputs.draws`
    interpret: Any  # None, or the argument `interpret` of Pallas, which runs without a GPU


class KernelInputs(NamedTuple):
    """References to the inputs of a kernel in global memory; an unused input is None.

    In the kernel that computes gradients of keys, each tile of `bias`, `mask` and `factors` is
    transposed, and the order of the tiles is unchanged.
    """

    q: Any  # The queries [B, T, H, K].
    keys: Any  # The keys [B, S, G, K].
    values: Any  # The values [B, S, G, K].
    # For each query tile, the first key tile that it visits and the one after the last, int32
    # [B, I, 2].
    key_tiles: Any
    # For each key tile, the first query tile that visits it and the one after the last, int32
    # [B, J, 2].
    query_tiles: Any
    # The first C of the S keys and values, [B, C, G, K]; `keys` and `values` then have the other
    # S - C. Kernels load tiles of the cached arrays into the same buffers in shared memory as tiles
    # of `keys` and `values`.
    cached_keys: Any = None
    cached_values: Any = None
    # Two numbers for each query and key; None if they are not normalized. The first number is a
    # factor of the logits, and only the gradients need the second. `query_norms` [B, H, 2, T] has
    # the head's scale / |q| and 1 / |q|^2, and `key_norms` [B, G, 2, S] has 1 / |k| and 1 / |k|^2.
    query_norms: Any = None
    key_norms: Any = None
    # Added to the logits, float32 [H, T, S]. If `KernelSettings.by_distance`, it is a strip
    # [H, TILE, X] with one tile for each of the X / TILE distances between query and key tiles.
    bias: Any = None
    # Added to the logits of all heads, bfloat16 [B, T, S], or [B, TILE, S] if all tiles of queries
    # share it.
    mask: Any = None
    # Factors of the weights, float32 [H, W, W]. They repeat after W queries and after W keys.
    factors: Any = None
    # The first key that a query sees, and the key after the last one, int32 [B, 2, T].
    spans: Any = None
    # Two 32-bit words per query, whose hash decides which weights dropout removes, int32 [B, 2, T].
    draws: Any = None
    # The following fields are for the backward pass only.
    gradient: Any = None  # The gradient of the output [B, T, H, K].
    # Two numbers for each query [B, H, 2, T]: the log-sum-exp of the logits, and the number that
    # the gradient of the softmax subtracts. The latter is the sum over the keys of the weight times
    # the weight's gradient, minus the gradient of the log-sum-exp.
    sums: Any = None

    @property
    def cached_tiles(self) -> int:
        return 0 if self.cached_keys is None else self.cached_keys.shape[1] // TILE
