"""Constants, limits and small functions that the Pallas kernels for GPUs share.

In shapes, R is the number of queries of a tile and C of keys of a tile.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch

try:
    from jax.experimental.pallas import triton
# jax 0.11 deprecates the module that is imported here, and a later version may remove the module.
except ImportError:
    triton = None  # type: ignore[assignment]

# The kernels multiply logits by this number, log2(e), and compute powers of two instead of powers
# of e, because the hardware has an instruction for powers of two.
LOG2E = 1.4426950408889634
# The launch parameters of the kernels are tuned for this compute capability (H100, H200). Other
# GPUs have less shared memory or other matrix units, so the kernels refuse them.
_CAPABILITY = "9.0"


class LaunchShape(NamedTuple):
    """Launch parameters of one kernel.

    Attributes:
      rows: the number of queries of a tile.
      columns: the number of keys of a tile.
      warps: the number of warps of a program.
      stages: the number of pipeline stages of a program's loop.
    """

    rows: int
    columns: int
    warps: int
    stages: int

    def compiler_params(self) -> Any:
        """Returns the parameters for the compiler of Triton kernels."""
        return triton and triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)


def capability_refusal() -> str | None:
    """Returns the reason why the kernels do not support the GPU that programs are compiled for, or
    None if they do.
    """
    capability = getattr(dispatch.device(), "compute_capability", _CAPABILITY)
    if capability != _CAPABILITY:
        return f"is cut for GPUs of compute capability {_CAPABILITY} (H100, H200), not {capability}"
    return None


def triton_refusal() -> str | None:
    """Returns the reason why a Triton kernel cannot run on the GPU that programs are compiled for,
    or None if it can.
    """
    if triton is None:
        return "needs Pallas' Triton backend, which this jax does not have"
    return capability_refusal()


def dot_float32(a: Array, b: Array) -> Float[Array, "..."]:
    """Returns the matrix product a b in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def update_softmax(
    logits: Float[Array, "R C"], top: Float[Array, " R"], total: Float[Array, " R"]
) -> tuple[Array, Array, Array, Array]:
    """Adds the logits of a tile to a running softmax.

    Args:
      logits: the logits of the tile, times log2(e).
      top: the maximum of each row's logits in earlier tiles, times log2(e).
      total: the sum of each row's weights in earlier tiles.

    Returns:
      The weights of the tile relative to the new maxima; the factor by which sums of earlier tiles
      must be multiplied; the new maxima; and the new sums of weights.
    """
    higher = jnp.maximum(top, jnp.max(logits, axis=1))
    weights, shrunk = jnp.exp2(logits - higher[:, None]), jnp.exp2(top - higher)
    return weights, shrunk, higher, total * shrunk + jnp.sum(weights, axis=1)
