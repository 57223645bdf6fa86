"""Inverted dropout, whose masks are drawn in the fastest way for each backend.

On CPUs, where the generator takes most of the time, one random byte decides whether an entry is
kept. On TPUs, random bytes take longer than random words of 32 bits. Compiling JAX's usual
generator for TPUs takes longer than compiling all other parts of a train step, and the TPU's own
generator draws the numbers of all devices on every device. On TPUs and GPUs, a hash of the key and
of an entry's position therefore decides whether the entry is kept. Kernels of attention compute
this hash themselves instead of reading a mask.
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

_BYTE_VALUES = 256
# On these kinds of TPUs, every operation that reads an array after dropout, or the gradient of such
# an array, computes the mask again while its matrix products run. This takes less time than storing
# the mask.
# On a v4, the integer products of the hash take too long, and on a v6e, the matrix products are too
# fast to hide the hash.
_FAST_HASHES = "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p"


@partial(jax.tree_util.register_dataclass, data_fields=["rng"], meta_fields=["rate"])
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Inverted dropout: entries are zeroed with probability `rate`, the others are scaled up.

    Arrays of equal shape lose the same entries if the key is the same. CPUs round `rate` to
    multiples of 1/256.
    """

    # The random key `rng` is an array. The field's type is Any because JAX's tree functions put
    # other objects into the field.
    rng: Any
    rate: float

    def __call__(self, x: Float[Array, "B *T"]) -> Float[Array, "B *T"]:
        mask = self._drawn(rules.lane_indices(x.shape[0]), x.shape[1:])
        return x * mask.factors(x.dtype, stored=dispatch.device_kind() not in _FAST_HASHES)

    def factors(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "B *T"]:
        """Returns random factors, 0 or 1 / (1 - rate).

        The first axis has the rows of the batch (of this device, within a `shard_map`). The factors
        of a row depend on the row's index in the batch of all devices, not on the other rows.
        """
        return self._drawn(rules.lane_indices(shape[0]), shape[1:]).factors(dtype)

    def shared_mask(self, heads: int, rows: int, columns: int) -> "DropoutMask":
        """Returns one mask [heads, rows, columns], to be applied to every row of the batch."""
        indices = jnp.arange(heads)
        if not dispatch.policy().packs_dropout:
            return self._drawn(indices, (rows, columns))
        # The mask is drawn in the shape in which `dropout_bits` packs it. In another shape, XLA
        # would store the random numbers in memory before packing. The masks of several layers are
        # kept apart, because one instruction that packed five masks took the compiler seven times
        # as long as five instructions.
        cut = *dropout_bits.bit_layout(columns), rows
        keep, scale = _draw_hash(self.rng, self.rate, indices, cut, apart=True)
        return DropoutMask(keep.reshape(heads, columns, rows), scale, transposed=True)

    def _drawn(self, lanes: Int[Array, " B"], shape: tuple[int, ...]) -> "DropoutMask":
        return DropoutMask(*dispatch.run(OP, None, self.rng, self.rate, lanes, shape))

    def part(self, index: Array | int) -> "Dropout":
        """Returns a `Dropout` with a key derived from `index`; each array needs its own index."""
        return Dropout(jax.random.fold_in(self.rng, index), self.rate)


@partial(
    jax.tree_util.register_dataclass, data_fields=["keep"], meta_fields=["scale", "transposed"]
)
@dataclasses.dataclass(frozen=True)
class DropoutMask:
    """The entries of an array that dropout keeps, and the factor that scales them up."""

    keep: Bool[Array, "*T"]  # True for kept entries
    scale: float  # 1 / (1 - rate)
    transposed: bool = False  # True if `keep` has the last two axes of the array in reverse order.

    def factors(self, dtype: jnp.dtype, stored: bool = True) -> Float[Array, "*T"]:
        """Returns the factors of the entries, 0 or `scale`.

        If `stored` is True, TPUs compute the mask once. If not, each operation that reads the
        factors computes the mask again. On other backends, the compiler decides this.
        """
        keep = _draw_once(self.keep) if stored else self.keep
        factors = jnp.where(keep, jnp.asarray(self.scale, dtype), 0)
        return factors.swapaxes(-1, -2) if self.transposed else factors

    def packed_words(self) -> UInt32[Array, "H G R"]:
        """Packs the C entries of each row of the mask [H, R, C] into G words (`dropout_bits`)."""
        keep = self.keep if self.transposed else self.keep.swapaxes(-1, -2)
        return _draw_once(dropout_bits.pack(keep))


def _draw_once(x: Array) -> Array:
    # Without the barrier, XLA for TPUs would compute the hash again in each operation that reads x.
    if not dispatch.policy().stores_barriers:
        return x
    return checkpoint_name(jax.lax.optimization_barrier(x), dispatch.KERNEL_RESIDUAL)


DrawnMask = tuple[Bool[Array, "B *T"], float]


def _draw_hash(
    rng: Array, rate: float, rows: Int[Array, " B"], shape: tuple[int, ...], apart: bool = False
) -> DrawnMask:
    terms, key = _position_terms(rows, shape), jax.random.key_data(rng)
    # The masks of several layers are hashed from the same positions, so compilers would compute
    # several masks in one instruction. The barrier keeps the masks apart.
    if apart:
        terms, key = jax.lax.optimization_barrier((terms, key))
    full_shape = len(rows), *shape
    parts = [jax.lax.broadcast_in_dim(x, full_shape, (axis,)) for axis, x in enumerate(terms)]
    drawn = _mix_bits(
        _mix_bits(sum(parts[1:], parts[0]) * jnp.uint32(0x9E3779B9) + key[0]) ^ key[1]
    )
    return drawn >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1)), 1 / (1 - rate)


def _position_terms(rows: Int[Array, " B"], shape: tuple[int, ...]) -> list[UInt32[Array, " _"]]:
    """Returns, for each axis, the term that each index on the axis adds to an entry's position.

    The position is the index of the entry in the flattened array of all devices.
    """
    sizes = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
    each = rows, *(jnp.arange(n) for n in shape)
    return [x.astype(jnp.uint32) * jnp.uint32(n % 2**32) for x, n in zip(each, sizes, strict=True)]


def _mix_bits(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permutes 32-bit numbers so that each bit depends on all bits (lowbias32, Wellons 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def _draw_bytes(
    rng: Array, rate: float, rows: Int[Array, " B"], shape: tuple[int, ...]
) -> DrawnMask:
    dropped = min(max(round(rate * _BYTE_VALUES), 1), _BYTE_VALUES - 1)
    draw = jax.vmap(lambda row: _random_bytes(jax.random.fold_in(rng, row), shape))
    return draw(rows) >= dropped, _BYTE_VALUES / (_BYTE_VALUES - dropped)


def _random_bytes(rng: Array, shape: tuple[int, ...]) -> UInt8[Array, "*T"]:
    *front, last = shape or (1,)
    words = jax.random.bits(rng, (*front, -(-last // 4)), jnp.uint32)
    drawn = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return drawn.reshape(*front, -1)[..., :last].reshape(shape)


OP = Op(
    "dropout",
    (
        Implementation("xla_cpu", _draw_bytes),
        Implementation("xla", _draw_hash),
    ),
)
