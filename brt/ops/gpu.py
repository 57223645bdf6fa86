"""Constants, limits and small functions that the Pallas kernels for GPUs share."""

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
    """Launch parameters of one kernel; a tile has `rows` queries and `columns` keys."""

    rows: int
    columns: int
    warps: int
    stages: int

    def compiler_params(self) -> Any:
        return triton and triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)


def capability_refusal() -> str | None:
    """Returns why the kernels do not support the GPU that is compiled for, or None."""
    capability = getattr(dispatch.device(), "compute_capability", _CAPABILITY)
    if capability != _CAPABILITY:
        return f"is cut for GPUs of compute capability {_CAPABILITY} (H100, H200), not {capability}"
    return None


def triton_refusal() -> str | None:
    """Returns why a Triton kernel cannot run on the GPU that is compiled for, or None."""
    if triton is None:
        return "needs Pallas' Triton backend, which this jax does not have"
    return capability_refusal()


def dot_float32(a: Array, b: Array) -> Float[Array, "..."]:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def update_softmax(
    logits: Float[Array, "R C"], top: Float[Array, " R"], total: Float[Array, " R"]
) -> tuple[Array, Array, Array, Array]:
    """Adds the logits of a tile of R queries and C keys to a running softmax.

    All logits are multiplied by log2(e). `top` and `total` are the maximum of each row's logits and
    the sum of its weights in earlier tiles. Returns the tile's weights relative to the new maxima,
    the factor for sums of earlier tiles, the new maxima, and the new sums of weights.
    """
    higher = jnp.maximum(top, jnp.max(logits, axis=1))
    weights, shrunk = jnp.exp2(logits - higher[:, None]), jnp.exp2(top - higher)
    return weights, shrunk, higher, total * shrunk + jnp.sum(weights, axis=1)
