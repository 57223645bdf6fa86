"""What kernels for TPUs share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.normalization import EPSILON

LANES = 128  # of a vector register
VMEM_BYTES = 64 * 2**20  # that a kernel may take
_V4_VMEM_BYTES = 16 * 2**20  # all that a core of a v4 has
_TWO_CORES = "TPU v4", "TPU v5", "TPU v5p"  # which share a chip
_STRAIGHT = 16  # parts whose code stands one after the other

# Which axes of two matrices a product sums over.
BY_ROW = (((1,), (1,)), ((), ()))  # a b^T
BY_SLOT = (((0,), (0,)), ((), ()))  # a^T b
PLAIN = (((1,), (0,)), ((), ()))  # a b


def _kind() -> str:
    """Of the chip that is compiled for; nothing: it is not known."""
    return getattr(dispatch.device(), "device_kind", "")


def vmem() -> int:
    """Bytes that a kernel may take on the chip that is compiled for, if that is known."""
    return _V4_VMEM_BYTES if "v4" in _kind() else VMEM_BYTES


def cores() -> int:
    """Of a chip, which share the steps of a kernel's grid."""
    return 2 if _kind() in _TWO_CORES else 1


def room() -> int:
    """Of these, for blocks and what is computed with."""
    return vmem() - 2 * 2**20


def too_large(taken: int, what: str = "a head", most: int | None = None) -> str | None:
    """Why a kernel cannot keep on the chip what takes so many bytes; None: it can.

    Args:
      most: bytes that there are; None: `room`.
    """
    most = room() if most is None else most
    if taken <= most:
        return None
    return f"keeps {what} on the chip, {most >> 20} MiB of it at most, not {-(-taken >> 20)}"


def refuses_heads(width: int, dtype: jnp.dtype) -> str | None:
    """Why a kernel does not take heads of such a size and dtype; None: it does."""
    if width not in (64, 128, 256):
        return f"has heads of 64, 128 or 256, not of {width}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {dtype}"
    return None


def stored(x: Array) -> Array:
    """x as an array, where compilers would make it a part of the product that reads it, and
    compute it anew for every tile of that."""
    return jax.lax.optimization_barrier(x) if dispatch.backend() == "tpu" else x


def tokens_first(x: Float[Array, "B H T K"]) -> Float[Array, "B T H K"]:
    """Turned as bits: what reads bits finds those that a kernel wrote, and nothing is copied."""
    return dispatch.numbers(stored(dispatch.bits(x).swapaxes(1, 2)), x.dtype)


def product(a: Array, b: Array, axes: tuple) -> Array:
    """Float32; of float32 at full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def unit(x: Float[Array, "R K"]) -> tuple[Float[Array, "R K"], Float[Array, "R 1"]]:
    """x / |x| and 1 / |x|, float32."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return wide * inverse, inverse


def through_unit(
    x: Float[Array, "R K"], gradient: Float[Array, "R K"]
) -> tuple[Float[Array, "R K"], Float[Array, "R 1"]]:
    """The gradient of x, given that of x / |x|; and the latter along it."""
    direction, inverse = unit(x)
    along = jnp.sum(gradient * direction, axis=-1, keepdims=True)
    return (gradient - along * direction) * inverse, along


def whole(*shape: int) -> Any:
    """Where a step of the grid (heads, lanes, ...) finds its part of an array [B, H, *shape]."""
    return pl.BlockSpec((None, None, *shape), lambda h, b, *_: (b, h, *(0 for _ in shape)))


def heads_first(axes: int) -> pltpu.CompilerParams:
    """Of a grid whose first axis is that of heads: cores that share a chip share them."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", *["arbitrary"] * (axes - 1)), vmem_limit_bytes=VMEM_BYTES
    )


def each(count: int, body: Callable[[Any, Any], Any], carry: Any = None) -> Any:
    """What `carry` becomes over the parts 0 to `count`; up to 16 of them are straight code."""
    size = next(n for n in range(min(count, _STRAIGHT), 0, -1) if count % n == 0)

    def some(i: Any, carry: Any) -> Any:
        for j in range(size):
            carry = body(i * size + j, carry)
        return carry

    return some(0, carry) if size == count else jax.lax.fori_loop(0, count // size, some, carry)
