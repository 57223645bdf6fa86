"""Tiles of the TPU kernels of window attention: the rows that are processed at once.

The module `pallas_tpu` describes the algorithm. A row is a query of a block. Slot c of a row is key
c of the row's own block if the row sees this key, and otherwise key c of the previous block. A tile
has R rows of a block of W. A matrix of logits or weights has slots x rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from brt.ops import dropout_bits
from brt.ops.softmax import MASKED
from brt.ops.tpu import NN, NT, dot_float32
from brt.ops.window_attention.tpu_arrays import BlockDocuments


class WindowKernelSettings(NamedTuple):
    """Static settings of the kernels; `api.window_part` describes the first two."""

    attend_to_self: bool
    null_keys: bool
    rows: int  # The number R of rows of a tile.
    interpret: bool | pltpu.InterpretParams  # True runs the kernels on any device, slowly.
    # A number of tokens: the segment is split into parts of this length, and documents start only
    # at starts of parts. If it is a multiple of the block, the kernels mask the previous block as a
    # whole; otherwise they mask, for each tile, the keys before the tile's document.
    part: int
    scale: float = 1.0  # Dropout multiplies the weights that it keeps by this number.


class LoadedBlocks(NamedTuple):
    """Keys and values of the previous and the current block; keys are normalized if necessary."""

    keys: tuple[Array, Array]
    values: tuple[Array, Array]
    # The number `unseen` is added to the logits of the previous block. It is MASKED if the previous
    # block belongs to another document, and 0 otherwise. It is always 0 in two cases: if documents
    # may start inside of blocks, because each tile then has a mask of its own, and with null keys,
    # because the hidden keys and values are then replaced by zeros instead of being masked.
    unseen: Array
    # [W, 1], 1 / |k| for each key k of the current block; None if keys are not normalized.
    inverse_norms: Array | None


def _stack(parts: list[Array]) -> Array:
    return jnp.concatenate([part for part in parts if len(part)], axis=0)


class RowTile(NamedTuple):
    """Tile i of a block of W rows: the R rows i R to (i + 1) R.

    The tile sees only (i + 1) R keys of the current block and W - i R keys of the previous block.
    Arguments and results named `current` and `before` have a row for each of these keys.
    """

    i: int
    rows: int
    attend_to_self: bool

    @property
    def all(self) -> slice:
        """The slice of the block's rows that are in the tile."""
        return slice(self.i * self.rows, (self.i + 1) * self.rows)

    @property
    def current(self) -> slice:
        """The slice of the current block's W keys that at least one row of the tile sees."""
        return slice(0, (self.i + 1) * self.rows)

    @property
    def before(self) -> slice:
        """The slice of the previous block's W keys that at least one row of the tile sees."""
        return slice(self.i * self.rows, None)

    # The mask of the tile's diagonal square is True where the slot is of the current block.
    def _own(self) -> Bool[Array, "R R"]:
        slot, row = (jax.lax.broadcasted_iota(jnp.int32, (self.rows, self.rows), a) for a in (0, 1))
        return slot <= row if self.attend_to_self else slot < row

    def fold(self, current: Array, before: Array) -> Float[Array, "W R"]:
        """Returns, for each slot and row, the logit (or another product) of the key in the slot.

        `current` is [(i + 1) R, R] and `before` is [W - i R, R].
        """
        begin, rows = self.i * self.rows, self.rows
        middle = jnp.where(self._own(), current[begin:], before[:rows])
        return _stack([current[:begin], middle, before[rows:]])

    def unfold(self, x: Float[Array, "W R"], dtype: jnp.dtype) -> tuple[Array, Array]:
        """Inverts `fold`: returns the weights (or gradients) x of slots as `current` and `before`.

        Keys that are in no slot of a row get zero.
        """
        middle, own = x[self.all], self._own()
        current = _stack([x[: self.i * self.rows], jnp.where(own, middle, 0)])
        before = _stack([jnp.where(own, 0, middle), x[(self.i + 1) * self.rows :]])
        return current.astype(dtype), before.astype(dtype)

    def dropout_mask(self, words: Any) -> Bool[Array, "W R"]:
        """Returns True for weights that dropout keeps; `words` are those of the block."""
        return dropout_bits.unpack(words[:, self.all], words.shape[1])

    def rolled_bias(self, tile: Any) -> Float[Array, "W R"]:
        """Returns the tile's bias: the first tile's bias `tile` [W, R], rolled by i R slots."""
        if not self.i:
            return tile[...]
        cut = tile.shape[0] - self.i * self.rows
        return jnp.concatenate([tile[cut:], tile[:cut]], axis=0)

    def add_rolled(self, tile: Any, x: Float[Array, "W R"]) -> None:
        """Adds the gradient x of the tile's bias, rolled back, to `tile`, of the first."""
        cut, begin = tile.shape[0] - self.i * self.rows, self.i * self.rows
        tile[:cut] += x[begin:]
        if self.i:
            tile[cut:] += x[:begin]

    def logits(
        self, block: LoadedBlocks, own: Float[Array, "R K"], tile: Any, documents: BlockDocuments
    ) -> Float[Array, "W R"]:
        """Returns the logits of each slot and row of the tile, with bias and mask.

        `own` has the queries of the tile's rows, and `tile` [W, R] the bias of the block's first
        tile; None for no bias.
        """
        first = documents.document_start(self.all.start) if documents.start_inside else None
        results = self.folded_products(block.keys, own, block.unseen, first)
        return results if tile is None else results + self.rolled_bias(tile)

    def folded_products(
        self, pair: tuple[Array, Array], x: Float[Array, "R K"], unseen: Array | float = 0.0,
        first: Array | None = None,
    ) -> Float[Array, "W R"]:  # fmt: skip
        """Returns the dot products of the vectors of all slots with each row of x.

        Args:
          pair: the keys (or values) of the previous block and of the current block, each [W, K].
          unseen: a number that is added to the products with the previous block, to mask a block of
            another document.
          first: the position of the first key of the rows' document, relative to the start of the
            current block. Products with earlier keys become MASKED. None masks no products.
        """
        before, current = pair
        both = dot_float32(current[self.current], x, NT), dot_float32(before[self.before], x, NT)
        if first is None:
            return self.fold(both[0], both[1] + unseen)
        # `self.before` selects keys of the previous block. Counted from the start of the current
        # block, the first of these keys has the position `begin`, a negative number.
        begin = self.before.start - len(before)
        return self.fold(_hide_before(first, both[0]), _hide_before(first - begin, both[1]))

    def weighted_sums(
        self, columns: tuple[Array, Array], current: Array, before: Array
    ) -> Float[Array, "K R"]:
        """Returns, for each row of the tile, the sum of the values, weighted by attention weights.

        `columns` are the transposed values [K, W] of the previous block and of the current block.
        """
        current_sums = dot_float32(columns[1][:, self.current], current, NN)
        return current_sums + dot_float32(columns[0][:, self.before], before, NN)

    def finished_sums(self, total: Any, current: Array, x: Float[Array, "R K"]) -> Array:
        """Adds the gradients of the current block's keys (or values) from the tile's rows to
        `total`.

        `current` has the gradients of their logits (or the weights), and x the tile's queries (or
        the gradients of its outputs). The tiles of a block are processed from the last to the
        first, so the gradients of the keys i R to (i + 1) R are then complete, and are returned.
        """
        added, begin = dot_float32(current, x, NN), self.all.start
        if begin:
            total[:begin] += added[:begin]
        return total[self.all] + added[begin:]

    def add_to_previous(self, total: Any, before: Array, x: Float[Array, "R K"]) -> None:
        """Adds the gradients of the previous block's keys (or values) from the tile's rows to
        `total`.

        The first R of them take the place of the current block's sums that `finished_sums`, with
        the corresponding arguments, has returned.
        """
        added, end = dot_float32(before, x, NN), self.all.stop
        total[self.all] = added[: self.rows]
        if end < len(total):
            total[end:] += added[self.rows :]


def _hide_before(first: Array, products: Float[Array, "S R"]) -> Float[Array, "S R"]:
    place = jax.lax.broadcasted_iota(jnp.int32, products.shape, 0)
    return jnp.where(place >= first, products, MASKED)


def row_tiles(window: int, settings: WindowKernelSettings) -> list[RowTile]:
    count = window // settings.rows
    return [RowTile(i, settings.rows, settings.attend_to_self) for i in range(count)]
