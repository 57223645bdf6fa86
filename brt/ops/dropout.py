"""Dropout.

On CPUs drawing is what it costs: which entries stay is drawn a byte each, four from one word of
the generator, in a seventh of the time. TPUs take two to four times as long for words cut in
four as for a word an entry. The usual generator takes their compiler longer than all else in
a step, and their own one draws on every device what all of them need: there the place of an entry
is hashed with the key.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from brt.distributed import rules
from brt.ops import dispatch, dropout_bits
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
        return self._drawn(rules.rows(shape[0]), shape[1:]).factors(dtype)

    def shared(self, heads: int, rows: int, columns: int) -> "Kept":
        """As `factors`, of matrices that all lanes share. On TPUs columns come first, cut as their
        bits are packed, or else an array of all numbers would be drawn first and packed then; and
        apart, since five packed at once took a compiler seven times as long as one by one."""
        lanes = jnp.arange(heads)
        if dispatch.backend() != "tpu":
            return self._drawn(lanes, (rows, columns))
        cut = *dropout_bits.by_bit(columns), rows
        kept, scale = _by_hash(self.rng, self.rate, lanes, cut, apart=True)
        return Kept(kept.reshape(heads, columns, rows), scale, turned=True)

    def _drawn(self, lanes: Int[Array, " B"], shape: tuple[int, ...]) -> "Kept":
        return Kept(*dispatch.run(OP, None, self.rng, self.rate, lanes, shape))

    def part(self, index: Array | int) -> "Dropout":
        """That of one of several arrays that are dealt with one after the other."""
        return Dropout(jax.random.fold_in(self.rng, index), self.rate)


@partial(jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["scale", "turned"])
@dataclasses.dataclass(frozen=True)
class Kept:
    """Which entries of an array stay, and what these are multiplied by.

    Attributes:
      turned: whether `kept` has the last two axes of the array in the other order.
    """

    kept: Bool[Array, "*T"]
    scale: float
    turned: bool = False

    def factors(self, dtype: jnp.dtype) -> Float[Array, "*T"]:
        """What the array is multiplied by."""
        factors = jnp.where(_drawn_once(self.kept), jnp.asarray(self.scale, dtype), 0)
        return factors.swapaxes(-1, -2) if self.turned else factors

    def stays(self) -> Bool[Array, "*T"]:
        """Which entries of the array stay."""
        kept = _drawn_once(self.kept)
        return kept.swapaxes(-1, -2) if self.turned else kept

    def words(self) -> UInt32[Array, "H G R"]:
        """Which stay of matrices with rows and columns, as `dropout_bits` of columns x rows."""
        kept = self.kept if self.turned else self.kept.swapaxes(-1, -2)
        return _drawn_once(dropout_bits.packed(kept))


def _drawn_once(x: Array) -> Array:
    """Where drawing is arithmetic that compilers would do again in all that reads it."""
    if dispatch.backend() != "tpu":
        return x
    return checkpoint_name(jax.lax.optimization_barrier(x), dispatch.KERNEL)


Drawn = tuple[Bool[Array, "B *T"], float]


def _by_words(rng: Array, rate: float, rows: Int[Array, " B"], shape: tuple[int, ...]) -> Drawn:
    draw = jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(rng, row), 1 - rate, shape))
    return draw(rows), 1 / (1 - rate)


def _by_hash(
    rng: Array, rate: float, rows: Int[Array, " B"], shape: tuple[int, ...], apart: bool = False
) -> Drawn:
    """`apart`: not by one instruction for all layers, as compilers do where places are shared."""
    along, key = _along(rows, shape), jax.random.key_data(rng)
    if apart:
        along, key = jax.lax.optimization_barrier((along, key))
    whole = len(rows), *shape
    places = [jax.lax.broadcast_in_dim(x, whole, (axis,)) for axis, x in enumerate(along)]
    drawn = _mixed(_mixed(sum(places[1:], places[0]) * jnp.uint32(0x9E3779B9) + key[0]) ^ key[1])
    return drawn >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1)), 1 / (1 - rate)


def _along(rows: Int[Array, " B"], shape: tuple[int, ...]) -> list[UInt32[Array, " _"]]:
    """What each axis adds to an entry's place in the whole array, of which no device has all."""
    sizes = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
    each = rows, *(jnp.arange(n) for n in shape)
    return [x.astype(jnp.uint32) * jnp.uint32(n % 2**32) for x, n in zip(each, sizes, strict=True)]


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A permutation in which every bit decides every other (lowbias32, Wellons 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def _by_bytes(rng: Array, rate: float, rows: Int[Array, " B"], shape: tuple[int, ...]) -> Drawn:
    dropped = min(max(round(rate * _CHANCES), 1), _CHANCES - 1)
    draw = jax.vmap(lambda row: _bytes(jax.random.fold_in(rng, row), shape))
    return draw(rows) >= dropped, _CHANCES / (_CHANCES - dropped)


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
