"""Dropout.

On CPUs drawing is what it costs: which entries stay is drawn a byte each, four from one word of
the generator, in a seventh of the time. TPUs take two to four times as long for words cut in
four as for a word an entry. The usual generator takes their compiler longer than all else in
a step, and their own one draws on every device what all of them need: there the place of an entry
is hashed with the key.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op

_CHANCES = 256  # of a byte


@partial(jax.tree_util.register_dataclass, data_fields=["rng"], meta_fields=["rate"])
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Inverted dropout: entries are zeroed with probability `rate`, the others are scaled up.

    Attributes:
      rng: the same one drops the same entries of the same shape, on the same backend.
      rate: on CPUs taken to the nearest of 1/256, 2/256 ... 255/256.
    """

    rng: Any  # Array; tree functions put other objects here
    rate: float

    def __call__(self, x: Float[Array, "*B"]) -> Float[Array, "*B"]:
        """x where it stays, scaled up."""
        return x * self.factors(x.shape, x.dtype)

    def factors(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "..."]:
        """What an array of this shape is multiplied by."""
        return dispatch.run(OP, None, self.rng, self.rate, shape, dtype)

    def part(self, index: Array | int) -> "Dropout":
        """That of one of several arrays that are dealt with one after the other."""
        return Dropout(jax.random.fold_in(self.rng, index), self.rate)


def _by_words(
    rng: Array, rate: float, shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "..."]:
    kept = jax.random.bernoulli(rng, 1 - rate, shape)
    return jnp.where(kept, jnp.asarray(1 / (1 - rate), dtype), 0)


def _by_hash(
    rng: Array, rate: float, shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "..."]:
    low, high = jax.random.key_data(rng)
    drawn = _mixed(_mixed(_places(shape) * jnp.uint32(0x9E3779B9) + low) ^ high)
    kept = drawn >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    kept = jax.lax.optimization_barrier(kept)  # drawn once, not in all that reads it
    return jnp.where(kept, jnp.asarray(1 / (1 - rate), dtype), 0)


def _places(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The place of every entry in the array; a device that has a part counts from its own."""
    places, step = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        places, step = places + along * jnp.uint32(step % 2**32), step * shape[axis]
    return places


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A permutation in which every bit decides every other (lowbias32, Wellons 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def _by_bytes(
    rng: Array, rate: float, shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "..."]:
    dropped = min(max(round(rate * _CHANCES), 1), _CHANCES - 1)
    kept = _bytes(rng, shape) >= dropped
    return jnp.where(kept, jnp.asarray(_CHANCES / (_CHANCES - dropped), dtype), 0)


def _bytes(rng: Array, shape: tuple[int, ...]) -> Array:
    *rows, last = shape
    words = jax.random.bits(rng, (*rows, -(-last // 4)), jnp.uint32)
    drawn = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return drawn.reshape(*rows, -1)[..., :last]


OP = Op(
    "dropout",
    (
        Implementation("xla_cpu", _by_bytes, auto=("cpu",)),
        Implementation("xla_tpu", _by_hash, auto=("tpu",)),
        Implementation("xla", _by_words),
    ),
)
