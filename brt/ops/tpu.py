"""Constants, limits and small functions that the Pallas kernels for TPUs share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.head_limits import heads_refusal
from brt.ops.normalization import EPSILON

# A vector register has this many lanes. Arrays are stored in tiles whose last axis has this size.
LANES = 128
VMEM_BYTES = 64 * 2**20  # A kernel may use this much on-chip vector memory (VMEM).
_V4_VMEM_BYTES = 16 * 2**20  # A core of a TPU v4 has only this much VMEM.
_MAX_UNROLL = 16  # The function `unrolled_loop` unrolls up to this many iterations.

# These are dimension numbers of `jax.lax.dot_general`: NT for a b^T, TN for a^T b, NN for a b.
NT = (((1,), (1,)), ((), ()))
TN = (((0,), (0,)), ((), ()))
NN = (((1,), (0,)), ((), ()))


def vmem_limit() -> int:
    """Returns the bytes of VMEM that a kernel may use on the kind of TPU that is compiled for."""
    return _V4_VMEM_BYTES if "v4" in dispatch.device_kind() else VMEM_BYTES


def vmem_budget() -> int:
    """Returns the bytes of VMEM that a kernel may use for blocks and intermediate results."""
    return vmem_limit() - 2 * 2**20


def vmem_refusal(taken: int, what: str = "a head", limit: int | None = None) -> str | None:
    """Returns why a kernel cannot keep `taken` bytes of `what` in VMEM, or None if it can.

    `limit` bytes are available, by default `vmem_budget()`.
    """
    limit = vmem_budget() if limit is None else limit
    if taken <= limit:
        return None
    return f"keeps {what} on the chip, {limit >> 20} MiB of it at most, not {-(-taken >> 20)}"


def head_refusal(x: Array) -> str | None:
    """Returns why a kernel does not support heads of the size and dtype of x, or None."""
    return heads_refusal(x, (64, 128, 256), ("float32", "bfloat16"))


def materialized(x: Array) -> Array:
    """Returns x; on TPUs, an optimization barrier stores x as an array in memory.

    XLA would otherwise repeat the computation of x for every tile of a matrix product that reads x.
    """
    return jax.lax.optimization_barrier(x) if dispatch.policy().stores_barriers else x


def tokens_first(x: Float[Array, "B H T K"]) -> Float[Array, "B T H K"]:
    """Returns a kernel's output with the axis of tokens before the axis of heads."""
    # Before this transpose, x is stored for the backward pass as integers with the same bits. The
    # integers are transposed here, and not x, so that the forward pass also reads the stored array.
    # Otherwise, XLA would make a copy of this array.
    return dispatch.from_bits(materialized(dispatch.to_bits(x).swapaxes(1, 2)), x.dtype)


def dot_float32(a: Array, b: Array, axes: tuple) -> Array:
    """Returns a float32 product at full precision; `axes` is NT, TN or NN."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def l2_normalize_rows(
    x: Float[Array, "*B R K"],
) -> tuple[Float[Array, "*B R K"], Float[Array, "*B R 1"]]:
    """Returns x / |x| and 1 / |x| for each row of x, in float32."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return wide * inverse, inverse


def l2_normalize_rows_backward(
    x: Float[Array, "*B R K"],
    gradient: Float[Array, "*B R K"],
    inverse: Float[Array, "*B R 1"] | None = None,
) -> tuple[Float[Array, "*B R K"], Float[Array, "*B R 1"]]:
    """Returns the gradient of x and, for each row, the dot product of `gradient` and u = x / |x|.

    `gradient` is the gradient of u. Both results are float32. The caller computes the gradient of a
    scale from the dot products. If `inverse` (1 / |x|) is None, it is computed again, which takes
    longer than the rest of the function.
    """
    if inverse is None:
        direction, inverse = l2_normalize_rows(x)
    else:
        direction = x.astype(jnp.float32) * inverse
    dots = jnp.sum(gradient * direction, axis=-1, keepdims=True)
    return (gradient - dots * direction) * inverse, dots


def head_block_spec(*shape: int) -> Any:
    """Returns the block spec with which a step of the grid reads one head of one row of the batch.

    The array has the axes [B, H, *shape]. The first two axes of the kernel's grid must be the heads
    and the rows of the batch.
    """
    return pl.BlockSpec((None, None, *shape), lambda h, b, *_: (b, h, *(0 for _ in shape)))


def parallel_heads(axes: int) -> pltpu.CompilerParams:
    """Returns compiler parameters for a grid whose first axis, the heads, is split over cores."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", *["arbitrary"] * (axes - 1)), vmem_limit_bytes=VMEM_BYTES
    )


def unrolled_loop(count: int, body: Callable[[Any, Any], Any], carry: Any = None) -> Any:
    """Returns the final `carry` of `carry = body(i, carry)` for i = 0 ... count - 1.

    Up to 16 iterations are unrolled; more become a loop over groups of unrolled iterations.
    """
    size = next(n for n in range(min(count, _MAX_UNROLL), 0, -1) if count % n == 0)

    def straight_code(i: Any, carry: Any) -> Any:
        for j in range(size):
            carry = body(i * size + j, carry)
        return carry

    return (
        straight_code(0, carry)
        if size == count
        else jax.lax.fori_loop(0, count // size, straight_code, carry)
    )
