"""Sizes of the tiles of masked attention's TPU kernels, and what they need in VMEM.

`pallas_tpu` describes the algorithm.
"""

import math

from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from brt.ops.masked_attention.tpu_kernels import MaskedKernelSettings
from brt.ops.tpu import LANES, vmem_budget

# A call of the kernels has at most one of these numbers of keys: the largest with which the logits
# of a group of queries and all keys fit into VMEM.
_MOST_KEYS = 8192, 4096, 2048, 1024
_TILES = 1024, 512, 256, 128  # The numbers of queries that a tile or a forward group may have.
# A call of the backward kernel has at least as many rows of the batch, if there is room for them.
_LANES = 8
# A group of the backward kernel has at most so many queries, and at most so many logits unless 128
# queries have more. With these numbers, the compiler's schedules are shortest.
_ROWS = 256
_LOGITS = 1024 * _ROWS
_FORWARD_LOGITS = 1024 * 1024  # A group of the forward kernel has at most so many logits.
_ARRAYS = 5  # The kernels need VMEM for so many float32 arrays of a group's logits.


def largest_sizes(queries: Array, keys: Array, bias: Array | None, mask: Array) -> "MaskedSizes":
    """Returns the sizes with as many keys in a call as fit into VMEM, or with the fewest."""
    each = [MaskedSizes(queries, keys, bias, mask, most) for most in _MOST_KEYS]
    return next((sizes for sizes in each if sizes.taken(LANES, 1) <= vmem_budget()), each[-1])


def heads_together(heads: int, width: int) -> int:
    """Returns the number of heads of a step: as many as fill the 128 lanes of a register."""
    return math.gcd(heads, max(LANES // width, 1))


class MaskedSizes:
    """The sizes of a problem on one device, and what its kernels need in VMEM.

    The first arguments are those of `pallas_tpu.attend_part`. A call of the kernels has at most
    `most` keys, a multiple of 128; the attribute `keys` is the number of keys of a call.
    """

    def __init__(
        self, queries: Array, keys: Array, bias: Array | None, mask: Array,
        most: int = _MOST_KEYS[0],
    ) -> None:  # fmt: skip
        (self.length, heads, self.width), size = queries.shape[-3:], keys.shape[-3]
        calls = -(-size // most)
        self.keys = min(size, -(-size // (calls * LANES)) * LANES)
        self.batch = math.prod(queries.shape[:-3])
        self.together = heads_together(heads, self.width)
        self.itemsize, self.biased = queries.dtype.itemsize, bias is not None
        self.own_masks = mask.shape[-2] > 1

    def rows(self, tile: int) -> int:
        """Returns the number of queries of a group in the backward kernel."""
        return math.gcd(tile, max(LANES, min(_ROWS, _LOGITS // self.keys)))

    def forward_rows(self, tile: int) -> int:
        """Returns the number of queries of a group in the forward kernel: as many as fit."""
        wide = max(self.width * self.together, LANES)
        blocks = 4 * wide * self.itemsize * (tile + self.keys)
        biases = self.biased * 2 * self.together * self.keys * tile * 4
        free = vmem_budget() - blocks - biases - self.own_masks * 2 * self.keys * tile
        most = min(_FORWARD_LOGITS, free // (_ARRAYS * 4)) // self.keys
        return next((n for n in _TILES if n <= most and tile % n == 0), math.gcd(tile, LANES))

    def taken(self, tile: int, lanes: int) -> int:
        """Returns the bytes of VMEM that the backward kernel needs with tiles of `tile` queries.

        These are two buffers for each block, the sums of the gradients of keys and values for
        `lanes` rows of the batch, and `_ARRAYS` arrays of the logits of a group.
        """
        wide = max(self.width * self.together, LANES)
        blocks = 2 * wide * self.itemsize * (3 * tile + 4 * self.keys)
        biases = self.biased * 4 * self.together * self.keys * tile * 4
        masks = self.own_masks * 2 * self.keys * tile
        sums = 2 * lanes * self.keys * wide * 4
        return blocks + biases + masks + sums + _ARRAYS * self.keys * self.rows(tile) * 4

    def lanes(self, tile: int) -> int:
        """Returns the number of rows of the batch whose sums have room in VMEM.

        It is less than 1 if a tile of this size does not fit.
        """
        if tile == self.length:
            return self.batch if self.taken(tile, 1) <= vmem_budget() else 0
        row = self.taken(tile, 1) - self.taken(tile, 0)
        return min((vmem_budget() - self.taken(tile, 0)) // row, self.batch)

    def settings(self, interpret: bool | pltpu.InterpretParams) -> MaskedKernelSettings:
        """Returns the settings of the kernels, with the largest tile that leaves enough room in
        VMEM.

        The sums of the batch, or of `_LANES` of its rows, need room. If there is too little for any
        tile, the smallest is taken.
        """
        tiles = [n for n in _TILES if self.length % n == 0] or [self.length]
        enough = (n for n in tiles if self.lanes(n) >= min(self.batch, _LANES))
        tile = next(enough, tiles[-1])
        return MaskedKernelSettings(
            self.width, self.together, tile, self.forward_rows(tile), self.rows(tile),
            max(self.lanes(tile), 1), interpret,
        )  # fmt: skip
