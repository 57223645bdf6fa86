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
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt8, UInt32

from brt.distributed import rules
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

    def __call__(self, x: Float[Array, "B *T"]) -> Float[Array, "B *T"]:
        """x where it stays, scaled up."""
        return x * self.factors(x.shape, x.dtype)

    def factors(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "B *T"]:
        """What an array of this shape, with lanes first, is multiplied by; what is drawn of a
        lane depends on its number in the whole batch and not on who else is here."""
        return dispatch.run(OP, None, self.rng, self.rate, rules.rows(shape[0]), shape[1:], dtype)

    def shared_factors(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "X *T"]:
        """As `factors`, of an array that all lanes share."""
        return dispatch.run(OP, None, self.rng, self.rate, jnp.arange(shape[0]), shape[1:], dtype)

    def part(self, index: Array | int) -> "Dropout":
        """That of one of several arrays that are dealt with one after the other."""
        return Dropout(jax.random.fold_in(self.rng, index), self.rate)


def _by_words(
    rng: Array, rate: float, rows: Int[Array, " B"], shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "B *T"]:
    draw = jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(rng, row), 1 - rate, shape))
    return jnp.where(draw(rows), jnp.asarray(1 / (1 - rate), dtype), 0)


def _by_hash(
    rng: Array, rate: float, rows: Int[Array, " B"], shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "B *T"]:
    low, high = jax.random.key_data(rng)
    drawn = _mixed(_mixed(_places(rows, shape) * jnp.uint32(0x9E3779B9) + low) ^ high)
    kept = drawn >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    kept = jax.lax.optimization_barrier(kept)  # drawn once, not in all that reads it
    kept = checkpoint_name(kept, dispatch.KERNEL)
    return jnp.where(kept, jnp.asarray(1 / (1 - rate), dtype), 0)


def _places(rows: Int[Array, " B"], shape: tuple[int, ...]) -> UInt32[Array, "B *T"]:
    """The place of every entry in the whole array, without any device having all of it."""
    places, step = jnp.zeros((len(rows), *shape), jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, places.shape, axis + 1)
        places, step = places + along * jnp.uint32(step % 2**32), step * shape[axis]
    along = rows.astype(jnp.uint32).reshape(-1, *[1] * len(shape))
    return places + along * jnp.uint32(step % 2**32)


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A permutation in which every bit decides every other (lowbias32, Wellons 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def _by_bytes(
    rng: Array, rate: float, rows: Int[Array, " B"], shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "B *T"]:
    dropped = min(max(round(rate * _CHANCES), 1), _CHANCES - 1)
    draw = jax.vmap(lambda row: _bytes(jax.random.fold_in(rng, row), shape))
    kept = draw(rows) >= dropped
    return jnp.where(kept, jnp.asarray(_CHANCES / (_CHANCES - dropped), dtype), 0)


def _bytes(rng: Array, shape: tuple[int, ...]) -> UInt8[Array, "*T"]:
    *front, last = shape or (1,)
    words = jax.random.bits(rng, (*front, -(-last // 4)), jnp.uint32)
    drawn = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return drawn.reshape(*front, -1)[..., :last].reshape(shape)


OP = Op(
    "dropout",
    (
        Implementation("xla_cpu", _by_bytes, auto=("cpu",)),
        Implementation("xla_tpu", _by_hash, auto=("tpu",)),
        Implementation("xla", _by_words),
    ),
)
