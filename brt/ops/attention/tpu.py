"""Attention on TPUs to a whole slab of keys: how the arrays become kernel calls.

A slab is the S keys and values that the Q queries of a block share. A step of a kernel's grid has a
tile of these queries, and processes it in sub-tiles. `tpu_call` describes the kernels. In shapes, X
is the number of slabs, and G the number of heads of keys.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.ops.attention import tpu_call
from brt.ops.attention.tpu_call import SlabArguments
from brt.ops.attention.tpu_kernels import SlabSettings
from brt.ops.partial_attention import AttentionPart, merge_parts
from brt.ops.softmax import FLOOR
from brt.ops.tpu import LANES, head_refusal, vmem_budget, vmem_refusal

Interpret = bool | pltpu.InterpretParams
# A call without a window reads at most this many keys: the first of these numbers for which all
# keys of the call and the logits of a sub-tile fit into VMEM.
_MOST_KEYS = 8192, 4096, 2048, 1024
_TILES = 1024, 512, 256, 128  # possible numbers of queries of a step or a forward sub-tile
# A call of the backward kernel has at least this many rows of the batch, if there is room for them.
_LEAST_ROWS = 8
# A sub-tile of the backward kernel has at most _ROWS queries and at most _LOGITS logits; only a
# sub-tile of 128 queries may have more logits. With these numbers, the compiler's schedules are
# shortest.
_ROWS = 256
_LOGITS = 1024 * _ROWS
_FORWARD_LOGITS = 1024 * 1024  # A sub-tile of the forward kernel has at most this many logits.
_ARRAYS = 5  # The kernels need VMEM for this many float32 arrays of the size of the logits.


def heads_together(heads: int, width: int) -> int:
    """Returns the number of heads of a step.

    It is the number of heads that fill 128 lanes, or 1 if this number does not divide `heads`.
    """
    count = max(LANES // width, 1)
    return count if heads % count == 0 else 1


class SlabSizes:
    """The sizes of attention to whole slabs on one device, and the VMEM that it needs.

    The argument `keys` is the number S of keys of a slab. A call reads at most `max_keys` (a
    multiple of 128) of these keys. The attribute `keys` is the number of keys that a call reads. A
    step of the grid has `together` heads. `own_masks` is True if each query has a mask of its own.
    """

    def __init__(
        self, queries: int, keys: int, width: int, itemsize: int, *, together: int, biased: bool,
        own_masks: bool, max_keys: int = _MOST_KEYS[0],
    ) -> None:  # fmt: skip
        calls = -(-keys // max_keys)
        self.keys = min(keys, -(-keys // (calls * LANES)) * LANES)
        self.queries, self.itemsize, self.own_masks = queries, itemsize, own_masks
        self.together, self.wide = together, max(width * together, LANES)
        self.biases = biased * together * self.keys * 4  # the bytes of a query's bias

    def rows(self, tile: int) -> int:
        """Returns the number of queries of a sub-tile in the backward kernel."""
        return math.gcd(tile, max(LANES, min(_ROWS, _LOGITS // self.keys)))

    def forward_rows(self, tile: int) -> int:
        """Returns the number of queries of a sub-tile in the forward kernel.

        It is the largest number in `_TILES` that divides the tile, and for which a sub-tile has at
        most `_FORWARD_LOGITS` logits and fits into VMEM beside two buffers of each block. If there
        is none, it is the greatest common divisor of the tile and 128.
        """
        # The blocks are queries and outputs, keys and values, and any biases and masks.
        blocks = 2 * self.wide * self.itemsize * (2 * tile + 2 * self.keys)
        blocks += 2 * (self.biases + self.own_masks * self.keys) * tile
        limit = min(_FORWARD_LOGITS, (vmem_budget() - blocks) // (_ARRAYS * 4)) // self.keys
        return next((n for n in _TILES if n <= limit and tile % n == 0), math.gcd(tile, LANES))

    def taken(self, tile: int, rows: int) -> int:
        """Returns the bytes of VMEM that the backward kernel needs with tiles of `tile` queries.

        VMEM then holds two buffers for each block, the sums of the gradients of keys and values for
        `rows` rows of the batch, and `_ARRAYS` arrays of the size of a sub-tile's logits.
        """
        blocks = 2 * self.wide * self.itemsize * (3 * tile + 4 * self.keys)
        masks = self.own_masks * 2 * self.keys * tile
        sums = 2 * rows * self.keys * self.wide * 4
        logits = _ARRAYS * self.keys * self.rows(tile) * 4
        return blocks + 4 * self.biases * tile + masks + sums + logits

    def kept_rows(self, tile: int, batch: int) -> int:
        """Returns the largest number of rows of the batch for a call of the backward kernel.

        The sums of gradients of these rows must fit into VMEM, unless a tile has all queries. The
        number is less than 1 if a tile of `tile` queries does not fit.
        """
        if tile == self.queries:
            return batch if self.taken(tile, 1) <= vmem_budget() else 0
        row = self.taken(tile, 1) - self.taken(tile, 0)
        return min((vmem_budget() - self.taken(tile, 0)) // row, batch)

    def tile(self, batch: int) -> int:
        """Returns the number of queries of a step: the largest that leaves enough room in VMEM.

        A call must have room for `_LEAST_ROWS` rows of the batch, or for all rows if the batch has
        fewer (`kept_rows`). If no number of queries leaves enough room, the smallest is returned.
        """
        tiles = [n for n in _TILES if self.queries % n == 0] or [self.queries]
        enough = (n for n in tiles if self.kept_rows(n, batch) >= min(batch, _LEAST_ROWS))
        return next(enough, tiles[-1])


def slab_sizes(
    queries: Float[Array, "*B Q H K"], keys: Float[Array, "*B S G K"], *, biased: bool = False,
    own_masks: bool = False,
) -> SlabSizes:  # fmt: skip
    """Returns the sizes with the largest number of keys per call for which VMEM has room.

    If VMEM does not even have room for the smallest number in `_MOST_KEYS`, that one is used.
    """
    (tokens, heads, width), itemsize = queries.shape[-3:], queries.dtype.itemsize
    together = heads_together(heads, width) if keys.shape[-2] == heads else 1
    tried = [
        SlabSizes(
            tokens, keys.shape[-3], width, itemsize, together=together, biased=biased,
            own_masks=own_masks, max_keys=max_keys,
        )
        for max_keys in _MOST_KEYS
    ]  # fmt: skip
    return next((sizes for sizes in tried if sizes.taken(LANES, 1) <= vmem_budget()), tried[-1])


def slab_refusal(
    queries: Float[Array, "*B Q H K"], keys: Float[Array, "*B S G K"], *, biased: bool = False,
    own_masks: bool = False,
) -> str | None:  # fmt: skip
    """Returns why the kernels do not support attention to a slab, or None if they do."""
    tokens, size = queries.shape[-3], keys.shape[-3]
    if tokens % LANES or size % LANES:
        return f"takes a multiple of {LANES} queries and of {LANES} keys, not {tokens} and {size}"
    if reason := head_refusal(queries):
        return reason
    sizes = slab_sizes(queries, keys, biased=biased, own_masks=own_masks)
    return vmem_refusal(sizes.taken(LANES, 1))


def attend_to_slab(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "X S G K"],
    values: Float[Array, "X S G K"],
    bias: Float[Array, "H T S"] | None = None,
    mask: Bool[Array, "X #Q S"] | None = None,
    words: Int[Array, "X 2 Q"] | None = None,
    *,
    spans: Int[Array, "X 2 Q"] | None = None,
    rate: float = 0.0,
    scale: Float[Array, " H"] | None = None,
    interpret: Interpret | None = None,
) -> AttentionPart:
    """Returns the attention of every query of a block to the S keys of the block's slab.

    Args:
      queries: the T queries of a row are X / B blocks of Q queries; each block has its own slab.
      bias: allowed only if each row is a single block, so that T = Q.
      mask: True for the keys that a query sees.
      spans: instead of a mask, the first key that each query sees, and the key after the last one.
      words: the result of `dropout_hash.draw_words`, if weights are dropped with the rate `rate`.
      scale: if given, the norm to which the queries of each head are scaled.
    """
    (rows, size), (heads, width) = keys.shape[:2], queries.shape[2:]
    q = queries.reshape(rows, -1, heads, width)
    own_masks = mask is not None and mask.shape[1] > 1
    sizes = slab_sizes(q, keys, biased=bias is not None, own_masks=own_masks)
    if scale is not None:
        sizes.together = 1
    tile = sizes.tile(rows)
    if sizes.together == 1 and tile == q.shape[1] and bias is mask is spans is words is None:
        q = queries  # The kernel finds the queries of a block in their row, so no copy is needed.
    settings = SlabSettings(
        width, sizes.together, tile, sizes.forward_rows(tile), sizes.rows(tile), rate=rate,
        kept_rows=max(sizes.kept_rows(tile, rows), 1), all_keys=size, interpret=interpret or False,
    )  # fmt: skip
    if sizes.together > 1:
        q, k, v = (x.reshape(*x.shape[:2], heads * width) for x in (q, keys, values))
    else:
        q, k, v = (x.swapaxes(1, 2) for x in (q, keys, values))
    seen = spans
    if mask is not None:
        seen = mask.swapaxes(1, 2).astype(jnp.int8) if own_masks else mask.astype(jnp.float32)
    bias = None if bias is None else bias.swapaxes(1, 2)
    parts = []
    for start in range(0, size, sizes.keys):
        some = slice(start, start + sizes.keys)
        k_part, v_part = (x[:, some] if x.ndim == 3 else x[:, :, some] for x in (k, v))
        arguments = SlabArguments(
            q, (k_part,), (v_part,), None if bias is None else bias[:, some],
            _of_some_keys(seen, some), words, scale,
        )  # fmt: skip
        y, lse = tpu_call.attend(arguments, settings._replace(first_key=start))
        lse = lse.swapaxes(1, 2).reshape(queries.shape[:-1])
        parts.append(AttentionPart(y.reshape(queries.shape), lse))
    return parts[0] if len(parts) == 1 else _merged(parts, values.dtype)


def _of_some_keys(mask: Array | None, keys: slice) -> Array | None:
    if mask is None:
        return None
    if mask.dtype == jnp.int32:
        return mask - keys.start
    return mask[:, :, keys] if mask.dtype == jnp.float32 else mask[:, keys]


def _merged(parts: list[AttentionPart], dtype: Any) -> AttentionPart:
    whole = merge_parts(parts)
    # The log-sum-exp of a query that sees no key is FLOOR in every part. Merging would make it
    # greater, so it is set to FLOOR again.
    seen = functools.reduce(jnp.logical_or, [part.lse > FLOOR for part in parts])
    return AttentionPart(whole.output.astype(dtype), jnp.where(seen, whole.lse, FLOOR))
