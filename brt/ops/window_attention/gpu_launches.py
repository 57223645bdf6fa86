"""Launch parameters of the Triton kernels of window attention.

A program computes one tile of queries (rows) or keys (columns), in a loop over the other tiles.
"""

from typing import NamedTuple

from brt.ops.gpu import LaunchShape


class KernelLaunches(NamedTuple):
    """The launch parameters of each kernel for one head size."""

    forward: LaunchShape  # The kernel computes the attention output.
    queries: LaunchShape  # The kernel computes the gradient of the queries.
    keys: LaunchShape  # The kernel computes the gradients of keys and values.
    band: LaunchShape  # The kernel sums the gradient of the bias; its tiles are squares.


# `LAUNCHES` has the launch parameters for each head size. With these parameters, the compiler for
# sm_90a (H100, H200) spills no registers.
LAUNCHES = {
    64: KernelLaunches(
        LaunchShape(128, 64, 8, 3), LaunchShape(128, 64, 8, 3), LaunchShape(64, 128, 8, 3),
        LaunchShape(64, 64, 4, 3),
    ),
    128: KernelLaunches(
        LaunchShape(128, 64, 8, 2), LaunchShape(128, 64, 8, 2), LaunchShape(32, 128, 8, 2),
        LaunchShape(64, 64, 8, 2),
    ),
    256: KernelLaunches(
        LaunchShape(128, 32, 8, 2), LaunchShape(64, 32, 8, 2), LaunchShape(32, 64, 8, 3),
        LaunchShape(64, 64, 8, 1),
    ),
}  # fmt: skip
