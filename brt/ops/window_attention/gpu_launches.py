"""The sizes of tiles and other launch parameters of the Triton kernels of window attention.

The logits of a head are computed in tiles of some queries (rows) and some keys (columns). A program
computes the results of one tile of queries or of keys, in a loop over tiles.
"""

from typing import NamedTuple

from brt.ops.gpu import LaunchShape


class KernelLaunches(NamedTuple):
    """The launch parameters of each kernel for one head size.

    Attributes:
      forward: the kernel that computes the attention output.
      queries: the kernel that computes the gradient of the queries.
      keys: the kernel that computes the gradients of keys and values.
      band: the kernel that sums the gradient of the bias; its tiles are squares.
    """

    forward: LaunchShape
    queries: LaunchShape
    keys: LaunchShape
    band: LaunchShape


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
