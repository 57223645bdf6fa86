"""The hash of `dropout.Dropout` in signed integers, for the kernels of masked attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from brt.distributed import rules
from brt.ops.dropout import Dropout

_GOLDEN = 0x9E3779B9  # The hash multiplies the index of a weight by this number.


def query_keys(dropout: Dropout, queries: int) -> UInt32[Array, "T 2"]:
    draw = jax.vmap(lambda place: jax.random.key_data(dropout.part(place).rng)[:2])
    return draw(jnp.arange(queries))


def draw_words(keys: UInt32[Array, "T 2"], lanes: int, each: int) -> Int[Array, "B 2 T"]:
    """Returns, for each query, two words for the hash that decides which of its weights are kept.

    The first word depends on the row of the batch. `keys` is the result of `query_keys`, `lanes`
    the number of rows, and `each` the number of weights of a query in all heads.
    """
    row = rules.lane_indices(lanes).astype(jnp.uint32)[:, None]
    first = row * jnp.uint32(each * _GOLDEN % 2**32) + keys[None, :, 0]
    second = jnp.broadcast_to(keys[None, :, 1], first.shape)
    return jax.lax.bitcast_convert_type(jnp.stack([first, second], axis=1), jnp.int32)


def kept(
    place: Int[Array, "..."], first: Int[Array, "..."], second: Int[Array, "..."], rate: float
) -> Bool[Array, "..."]:
    """Returns True for weights that dropout keeps.

    `place` is the index of a weight's head times the number of keys, plus the index of its key;
    `first` and `second` are the random int32 numbers of its query (`draw_words`).
    """
    drawn = _mix_bits(_mix_bits(place * _int32(_GOLDEN) + first) ^ second)
    dropped = min(round(rate * 2**32), 2**32 - 1)
    # The most significant bit is flipped, because the numbers are compared as signed ones.
    return (drawn ^ _int32(1 << 31)) >= _int32(dropped ^ (1 << 31))


def _mix_bits(x: Int[Array, "..."]) -> Int[Array, "..."]:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ jax.lax.shift_right_logical(x, _int32(shift))) * _int32(factor)
    return x ^ jax.lax.shift_right_logical(x, _int32(15))


# The result is the signed number with the lower 32 bits of x.
def _int32(x: int) -> np.int32:
    return np.uint32(x % 2**32).view(np.int32)
