"""Dropout masks of matrices, packed to one bit per entry: a 32nd of the size of float32 factors.

A kernel for TPUs reads the words of a mask as vector registers of eight rows. Bit j of a word
belongs to the same column and to the j-th of up to 32 consecutive registers of the mask. A kernel
therefore unpacks one register of words to the masks of 32 registers without moving data between
rows or columns.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

_ROWS, _BITS = 8, 32  # rows of a vector register, bits of a word


def bit_layout(rows: int) -> tuple[int, int, int]:
    """Splits a number of rows into the factors (runs, bits of a word, rows of a register)."""
    of_register = math.gcd(rows, _ROWS)
    bits = max(n for n in range(1, _BITS + 1) if rows // of_register % n == 0)
    return rows // (of_register * bits), bits, of_register


def pack(mask: Bool[Array, "H R C"]) -> UInt32[Array, "H G C"]:
    """Packs the mask of each head into a matrix of words."""
    heads, rows, columns = mask.shape
    cut = mask.reshape(heads, *bit_layout(rows), columns)
    bit = jax.lax.broadcasted_iota(jnp.uint32, cut.shape, 2)
    words = jnp.sum(cut.astype(jnp.uint32) << bit, axis=2, dtype=jnp.uint32)
    return words.reshape(heads, -1, columns)


def unpack(words: Any, rows: int) -> Bool[Array, "R C"]:
    """Unpacks the words [G, C] of one head, or of some of its columns, to a mask of R rows."""
    runs, bits, of_register = bit_layout(rows)
    shape = runs, bits, of_register, words.shape[1]
    each = jnp.broadcast_to(words.reshape(runs, 1, of_register, -1), shape)
    bit = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    return (each & (jnp.uint32(1) << bit) != 0).reshape(rows, -1)
