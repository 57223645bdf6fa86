"""Dropout masks of matrices, packed to one bit per entry.

A vector register of a TPU holds eight rows of a matrix. The masks of up to 32 consecutive registers
are packed into one register of words. Bit j of the word in a row and column belongs to the entry in
the same row and column of the j-th register. A kernel therefore unpacks the masks without moving
data between rows or columns.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

_ROWS = 8  # A vector register has this many rows.
_BITS = 32  # A word has this many bits.


def bit_layout(rows: int) -> tuple[int, int, int]:
    """Returns how `pack` splits rows into groups of registers.

    The result has the number of groups, the number of registers in a group (which is the number of
    used bits in a word), and the number of rows in a register. Their product is `rows`.
    """
    register_rows = math.gcd(rows, _ROWS)
    bits = max(n for n in range(1, _BITS + 1) if rows // register_rows % n == 0)
    return rows // (register_rows * bits), bits, register_rows


def pack(mask: Bool[Array, "H R C"]) -> UInt32[Array, "H G C"]:
    """Returns the masks as 32-bit words.

    G is the number of groups times the number of rows in a register (see `bit_layout`).
    """
    heads, rows, columns = mask.shape
    cut = mask.reshape(heads, *bit_layout(rows), columns)
    bit = jax.lax.broadcasted_iota(jnp.uint32, cut.shape, 2)
    words = jnp.sum(cut.astype(jnp.uint32) << bit, axis=2, dtype=jnp.uint32)
    return words.reshape(heads, -1, columns)


def unpack(words: Any, rows: int) -> Bool[Array, "R C"]:
    """Inverts `pack` for the words [G, C] of one head, or of some columns of one head."""
    runs, bits, register_rows = bit_layout(rows)
    shape = runs, bits, register_rows, words.shape[1]
    each = jnp.broadcast_to(words.reshape(runs, 1, register_rows, -1), shape)
    bit = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    return (each & (jnp.uint32(1) << bit) != 0).reshape(rows, -1)
