"""Which entries of a matrix a head dropout keeps, a bit each: a 32nd of what factors take.

A word is of one column of the lanes; its bit j is of the j-th of a run of registers, each of eight
rows. So a kernel for TPUs that has a register of words makes the masks of all of these without
moving anything.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

_ROWS, _BITS = 8, 32  # of a register, and of a word


def by_bit(rows: int) -> tuple[int, int, int]:
    """So many rows as runs, bits of a word, rows of a register."""
    of_register = math.gcd(rows, _ROWS)
    bits = max(n for n in range(1, _BITS + 1) if rows // of_register % n == 0)
    return rows // (of_register * bits), bits, of_register


def packed(kept: Bool[Array, "H R C"]) -> UInt32[Array, "H G C"]:
    """A matrix of words a head."""
    heads, rows, columns = kept.shape
    cut = kept.reshape(heads, *by_bit(rows), columns)
    bit = jax.lax.broadcasted_iota(jnp.uint32, cut.shape, 2)
    words = jnp.sum(cut.astype(jnp.uint32) << bit, axis=2, dtype=jnp.uint32)
    return words.reshape(heads, -1, columns)


def unpacked(words: Any, rows: int) -> Bool[Array, "R C"]:
    """Of the words [G, C] of a head, or of some of its columns."""
    runs, bits, of_register = by_bit(rows)
    shape = runs, bits, of_register, words.shape[1]
    each = jnp.broadcast_to(words.reshape(runs, 1, of_register, -1), shape)
    bit = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    return (each & (jnp.uint32(1) << bit) != 0).reshape(rows, -1)
