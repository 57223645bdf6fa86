"""The backward pass of RMS normalization with a residual connection as a Pallas kernel for TPUs.

XLA computes the sums of the gradient in the product before, and the gradient of x in a pass over
the arrays of its own. The kernel does both in one pass, in which it also adds the gradient that
comes through the residual connection. The forward pass is left to XLA, which computes it while it
reads x for the following product.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.normalization import rms_norm, rms_norm_forward
from brt.ops.tpu import LANES, VMEM_BYTES

# A step of the grid computes at most _TILE numbers of at most _MOST vectors.
_TILE, _MOST = 2**18, 512


def refusal(x: Array, scale: Array, epsilon: float) -> str | None:
    """Returns the reason why the kernel does not support these inputs, or None if it does.

    The arguments are those of `residual_norm`.
    """
    if rules.partitioned():
        return "computes what one device has"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"computes in bfloat16 and float32, not in {x.dtype}"
    if x.ndim < 2:
        return "takes rows of vectors"
    rows, width = x.shape[-2:]
    if width % LANES or rows % LANES or not rows:
        return f"takes multiples of {LANES} vectors and numbers, not {rows} of {width}"
    if width * LANES > _TILE:
        return f"takes vectors of at most {_TILE // LANES:,} numbers, not {width:,}"
    return None


def _rows_of_tile(rows: int, width: int) -> int:
    """Returns the number of vectors that a step of the grid computes."""
    return math.gcd(rows, min(_MOST, _TILE // width // LANES * LANES))


def residual_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    epsilon: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns x / rms(x) * scale and x.

    Args:
      x: the vectors.
      scale: the factor of each number of a vector.
      epsilon: added to the mean square.
      interpret: True runs the kernel on any device, slowly.
    """
    return _residual_norm(x, scale, epsilon, interpret)


interpreted = functools.partial(residual_norm, interpret=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _residual_norm(x: Array, scale: Array, epsilon: float, interpret: bool) -> tuple[Array, Array]:
    return rms_norm(x, scale, epsilon), x


def _forward(
    x: Array, scale: Array, epsilon: float, interpret: bool
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    x = dispatch.input_residual(x)
    # The forward rule of `rms_norm`, unlike the function, lets a rematerialized layer save the
    # factor of each vector.
    h, _ = rms_norm_forward(x, scale, epsilon)
    return (h, x), (x, scale)


def _backward(
    epsilon: float, interpret: bool, saved: tuple[Array, Array], gradients: tuple[Array, Array]
) -> tuple[Array, Array]:
    x, scale = saved
    rows, width = x.shape[-2:]
    tile = _rows_of_tile(rows, width)
    lanes, tiles = x.size // (rows * width), rows // tile
    spec = pl.BlockSpec((None, tile, width), lambda lane, i: (lane, i, 0))
    arrays = [z.reshape(lanes, rows, width) for z in (x, *gradients)]
    dx, d_scale = pl.pallas_call(
        functools.partial(_kernel, epsilon=epsilon),
        grid=(lanes, tiles),
        in_specs=[spec, spec, spec, pl.BlockSpec((1, width), lambda *_: (0, 0))],
        out_specs=[spec, pl.BlockSpec((None, None, 1, width), lambda lane, i: (lane, i, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((lanes, rows, width), x.dtype),
            jax.ShapeDtypeStruct((lanes, tiles, 1, width), jnp.float32),
        ],
        name=f"residual_norm_backward_{tile}x{width}_{x.dtype}_{lanes * tiles}_steps",
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=lanes * rows, bytes_accessed=4 * x.nbytes
        ),
    )(*arrays, scale.astype(jnp.float32)[None])  # fmt: skip
    return dx.reshape(x.shape), jnp.sum(d_scale, axis=(0, 1, 2)).astype(scale.dtype)


_residual_norm.defvjp(_forward, _backward)


def _kernel(
    x: Any, gradient: Any, residual: Any, scale: Any, dx: Any, d_scale: Any, *, epsilon: float
) -> None:
    """Computes the gradient of a tile of vectors, and their part of the scale's gradient.

    Args:
      x: the vectors.
      gradient, residual: the gradients of both results of `residual_norm`.
      scale: the factor of each number of a vector.
      dx, d_scale: the outputs.
      epsilon: added to the mean square.
    """
    wide, outer = x[...].astype(jnp.float32), gradient[...].astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(mean + epsilon)
    y = wide * inverse
    product = outer * y
    d_scale[...] = jnp.sum(product, axis=0, keepdims=True)
    along = jnp.mean(product * scale[...], axis=-1, keepdims=True)
    inner = (outer * scale[...] - along * y) * inverse
    dx[...] = (inner + residual[...].astype(jnp.float32)).astype(dx.dtype)
