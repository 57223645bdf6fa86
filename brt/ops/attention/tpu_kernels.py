"""Bodies of the attention kernels for TPUs; `tpu_call` describes the algorithm.

A step of the grid has a tile of queries and a slab of keys, for one row of the batch and G heads,
which lie side by side in the lanes. The queries are processed in sub-tiles. Logits and weights are
matrices of keys x queries, so that maxima and sums over the keys need no operations across lanes.

In shapes, R is the number of queries of a step, r the number of queries of a sub-tile, L the number
of keys of the slab, C the number of keys that a sub-tile reads, W the number of tokens of a window,
K the size of a head, and P = G K the number of lanes of all heads of a step.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from brt.ops import dropout_bits, dropout_hash
from brt.ops.dispatch import from_bits, to_bits
from brt.ops.softmax import FLOOR
from brt.ops.tpu import (
    LANES,
    NN,
    NT,
    TN,
    dot_float32,
    l2_normalize_rows,
    l2_normalize_rows_backward,
)

# This number is added to the logits of hidden keys. Twice this number is still finite, and adding a
# logit to the number does not change it.
HIDDEN = -1e30
# The maximum of a query's logits is raised to at least this number. The number is far above HIDDEN
# and far below the logits of visible keys, so the weights of a query that sees no key are zero.
_LOWEST = -1e29
# At most this many weights of sub-tiles are computed before they are multiplied by the values.
_MOST_WEIGHTS = 1024 * 1024


class SubTile(NamedTuple):
    """A part of a step: some of its queries, and the keys of the slab that they read."""

    rows: slice
    keys: slice


class SlabSettings(NamedTuple):
    width: int  # K, the size of a head
    together: int  # G, the number of heads of a step
    queries: int  # R, the number of queries of a step
    forward_rows: int  # r in the forward kernel
    rows: int  # r in the backward kernel
    # W if there is a window: the slab then has the keys of the block of R = W queries and of the
    # block before, and a query sees only the keys in its window. 0 if queries see the whole slab.
    window: int = 0
    # Documents start only at multiples of this number of tokens of a segment. If the number is a
    # multiple of W, documents start only at blocks, and the kernels hide the block before the
    # queries' block as a whole or not at all.
    part: int = 0
    normalizes_keys: bool = False  # True if the kernels scale keys to length 1
    learns_bias: bool = True  # False if the bias only hides keys and has no gradient
    rate: float = 0.0  # the rate of dropout
    kept_rows: int = 1  # the largest number of rows of the batch in a backward call
    # A slab may be split among several calls. The calls need the next two numbers, because the hash
    # of dropout depends on the place of a key in the whole slab.
    first_key: int = 0  # the place of the first key of the call
    all_keys: int = 0  # the number of keys of the slab, in all calls
    interpret: bool | pltpu.InterpretParams = False  # True runs on any device, slowly

    @property
    def wide(self) -> int:
        return self.width * self.together

    def sub_tiles(self, rows: int) -> list[SubTile]:
        def keys(start: int) -> slice:
            return slice(start, start + self.window + rows) if self.window else slice(None)

        return [SubTile(slice(i, i + rows), keys(i)) for i in range(0, self.queries, rows)]

    def head_lanes(self, head: int) -> slice:
        return slice(head * self.width, (head + 1) * self.width)

    def only(self, head: int, x: Float[Array, "r P"]) -> Float[Array, "r P"]:
        """Returns x with zeros in the lanes of other heads.

        A product with x over the lanes is then a product of this head alone, although the other
        factor has all heads. This costs no time, because products over 64 lanes take as long as
        products over 128.
        """
        if self.together == 1:
            return x
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        of_head = (lane >= head * self.width) & (lane < (head + 1) * self.width)
        return jnp.where(of_head, x, jnp.zeros_like(x))


class SlabInputs(NamedTuple):
    """References to the inputs of a step, or their block specs; unused inputs are None."""

    q: Any  # [R, P]
    # Keys and values are the slab [L, P] or, for a window, three blocks [W, P]: the cached block,
    # which precedes the segment; the block before the queries' block; and the queries' block.
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    # The bias, float32 [G, L, R]. For windows, it is [G, W + r, r]; all sub-tiles share this array,
    # which also hides the keys outside of the window.
    bias: Any = None
    # The keys that are seen, in one of three forms:
    #   float32 [1, L]: zero for keys that are hidden from all queries;
    #   int8 [L, R]: zero for keys that are hidden from a query;
    #   int32 [2, R]: the first key that a query sees, and the key after the last one.
    mask: Any = None
    # For each query, two words from which the dropout of its weights is hashed, int32 [2, R]
    # (`dropout_hash.draw_words`). For windows, this is the dropout mask of a block instead, packed
    # by `dropout_bits` into words for each of the W queries, uint32 [words, W].
    dropout: Any = None
    scale: Any = None  # The norm to which queries are scaled, [1, 128]; None leaves them unscaled.
    # The following fields are for the backward pass only.
    gradient: Any = None  # The gradient of the output [R, P].
    lse: Any = None  # The bits of the log-sum-exp of each query's logits, uint32 [G, R].
    # For each query, the sum over the keys of the weight times the weight's gradient, minus the
    # gradient of the log-sum-exp, float32 [G, R].
    delta: Any = None

    def query(self, head: int, rows: slice, s: SlabSettings) -> tuple[Array, Array | None]:
        """Returns a sub-tile's queries, and 1 / |q| of each query (None without normalization)."""
        x = s.only(head, self.q[rows])
        if self.scale is None:
            return x, None
        unit, inverse = l2_normalize_rows(x)
        return (unit * self.scale[:, :1]).astype(x.dtype), inverse

    def dropped(
        self, head: int, tile: SubTile, x: Float[Array, "C r"], s: SlabSettings
    ) -> Float[Array, "C r"]:
        """Returns weights, or their gradients, with zeros where dropout drops a weight."""
        if self.dropout is None:
            return x
        return jnp.where(self._kept(head, tile, x.shape[0], s), x, 0.0)

    def _kept(self, head: int, tile: SubTile, keys: int, s: SlabSettings) -> Bool[Array, "C r"]:
        if s.window:
            # The mask has W slots for each query. Slot c is for key c of the query's own block or
            # for key c of the block before; the query sees only one of these two keys.
            slots = dropout_bits.unpack(self.dropout[:, tile.rows], s.window).astype(jnp.int32)
            turned = jnp.concatenate([slots, slots], axis=0)[tile.keys]
            return turned > 0
        first = (pl.program_id(0) * s.together + head) * s.all_keys + s.first_key
        position = first + jax.lax.broadcasted_iota(jnp.int32, (keys, 1), 0)
        words = self.dropout[0:1, tile.rows], self.dropout[1:2, tile.rows]
        return dropout_hash.kept(position, *words, s.rate)


class SlabGradients(NamedTuple):
    """References to the outputs of a step of the backward kernel, or their block specs."""

    q: Any
    # Without a window, the gradients of the slab's keys and values [L, P], which the step of the
    # last tile of queries writes. With a window, the gradients [W, P] of the keys and values of the
    # block that the step's queries are in.
    keys: Any
    values: Any
    # The gradients of a window's cached block. If the kernel normalizes keys, `cached_keys` is the
    # gradient of the normalized keys.
    cached_keys: Any
    cached_values: Any
    # The float32 gradients of a block of the bias and of the scale. Each is a sum over all steps
    # that read this block.
    bias: Any
    scale: Any


class Slab(NamedTuple):
    """The slab of keys and values of a step, and what hides keys from its queries."""

    keys: Float[Array, "L P"]
    values: Float[Array, "L P"]
    inverse: Float[Array, "L 1"] | None  # 1 / |k| of each key; None if keys are not normalized
    hidden: Float[Array, "L r"] | None  # added to logits: 0, or HIDDEN for masked keys
    # For each row of the batch and each part of the segment (`SlabSettings.part` tokens), the
    # position of the first token of the document to which the part belongs. Cached tokens have
    # negative positions.
    first: Any
    n: Array  # the index of the block in the segment

    def logits(
        self, head: int, tile: SubTile, q: Float[Array, "r P"], inputs: SlabInputs, s: SlabSettings
    ) -> Float[Array, "C r"]:
        x = dot_float32(self.keys[tile.keys], q, NT)
        if inputs.bias is not None:
            x += inputs.bias[head] if s.window else inputs.bias[head, :, tile.rows]
        if s.window:
            return self._without_other_documents(tile, x, s)
        if inputs.mask is None:
            return x
        if self.hidden is not None:
            return x + self.hidden
        mask = inputs.mask[:, tile.rows]
        if mask.dtype == jnp.int8:
            return jnp.where(mask.astype(jnp.int32) > 0, x, HIDDEN)
        key = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where((key >= mask[0:1]) & (key < mask[1:2]), x, HIDDEN)

    def _without_other_documents(
        self, tile: SubTile, x: Float[Array, "C r"], s: SlabSettings
    ) -> Float[Array, "C r"]:
        inside = s.part % s.window != 0  # True if documents may start inside of a block.
        row = self.n * s.window + (tile.rows.start if inside else 0)
        place = self.first[pl.program_id(2), jax.lax.div(row, jnp.int32(s.part))]
        start = place - (self.n - 1) * s.window - tile.keys.start
        if inside:
            key = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            return jnp.where(key >= start, x, HIDDEN)
        before = s.window - tile.keys.start
        hidden = jnp.where(start > -tile.keys.start, HIDDEN, 0.0)
        return jnp.concatenate([x[:before] + hidden, x[before:]], axis=0)


def _load(first: Any, n: Array, inputs: SlabInputs, rows: int, s: SlabSettings) -> Slab:
    def load(refs: tuple[Any, ...]) -> Array:
        if len(refs) == 1:
            return refs[0][...]
        cached, before, own = (ref[...] for ref in refs)
        return jnp.concatenate([jax.lax.select(n == 0, cached, before), own], axis=0)

    keys, values, inverse, hidden = load(inputs.keys), load(inputs.values), None, None
    if s.normalizes_keys:
        unit, inverse = l2_normalize_rows(keys)
        keys = unit.astype(keys.dtype)
    if inputs.mask is not None and inputs.mask.dtype == jnp.float32:
        hidden = jnp.where(inputs.mask[...] > 0, 0.0, HIDDEN)
        hidden = jnp.broadcast_to(hidden, (rows, hidden.shape[1])).T
    return Slab(keys, values, inverse, hidden, first, n)


def forward_kernel(
    first: Any, inputs: SlabInputs, outputs: tuple[Any, Any], *, settings: SlabSettings
) -> None:
    """Writes the output [R, P] and the log-sum-exp [G, R] of a step to `outputs`.

    Both are written as unsigned integers with the same bits, because JAX saves integers for the
    backward pass without an additional operation (`dispatch.output_residual`).
    """
    (y, lse), s = outputs, settings
    slab = _load(first, pl.program_id(3), inputs, s.forward_rows, s)
    columns, kept_scale = slab.values.T, 1 / (1 - s.rate)

    def weigh(tile: SubTile) -> list[tuple[Array, Array]]:
        found = []
        for head in range(s.together):
            q, _ = inputs.query(head, tile.rows, s)
            logits = slab.logits(head, tile, q, inputs, s)
            row_max = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), _LOWEST)
            weights = jnp.exp(logits - row_max)
            total = jnp.sum(weights, axis=0, keepdims=True)
            sees, divisor = total > 0, jnp.where(total > 0, total, 1.0)
            lse[head : head + 1, tile.rows] = to_bits(
                jnp.where(sees, row_max + jnp.log(divisor), FLOOR)
            )
            weights = inputs.dropped(head, tile, weights, s)
            found.append((weights.astype(columns.dtype), kept_scale / divisor))
        return found

    # The weights of several sub-tiles are computed before any of them is multiplied by the values.
    # The softmax of a sub-tile can then be computed while the matrix units compute the logits of
    # the next sub-tile.
    tiles = s.sub_tiles(s.forward_rows)
    span = (s.window + s.forward_rows) if s.window else slab.keys.shape[0]
    size = max(_MOST_WEIGHTS // (span * s.forward_rows * s.together), 1)
    for some in (tiles[i : i + size] for i in range(0, len(tiles), size)):
        for tile, found in zip(some, [weigh(tile) for tile in some], strict=True):
            sums = [
                dot_float32(columns[s.head_lanes(head), tile.keys], weights, NN) * share
                for head, (weights, share) in enumerate(found)
            ]
            y[tile.rows] = to_bits(_side_by_side(sums, columns.dtype))


def _side_by_side(heads: list[Float[Array, "K r"]], dtype: Any) -> Float[Array, "r P"]:
    return jnp.concatenate(heads, axis=0).T.astype(dtype)


def backward_kernel(
    first: Any, inputs: SlabInputs, results: SlabGradients, keys_sum: Any, values_sum: Any, *,
    settings: SlabSettings,
) -> None:  # fmt: skip
    """Writes the gradients of a step to `results`.

    The gradients of keys and values are added up in `keys_sum` and `values_sum`, float32 [_, L, P].
    The first axis has one entry, or one for each row of the batch if blocks have several tiles.

    With a window, the steps go from the last block of a segment to its first. After the step of a
    block, the gradients of its keys and values are complete, and those of the block before stay in
    the sums. Without a window, the sums of a row of the batch are complete after the last tile of
    queries.
    """
    s = settings
    t, row, n = pl.program_id(1), pl.program_id(2), pl.num_programs(3) - 1 - pl.program_id(3)
    slot = 0 if keys_sum.shape[0] == 1 else row
    keys_sum, values_sum = keys_sum.at[slot], values_sum.at[slot]
    is_first_step = (pl.program_id(3) == 0) & (row == 0)

    @pl.when((pl.program_id(3) == 0) if s.window else (t == 0))
    def _start_sums() -> None:
        for total in (keys_sum, values_sum):
            total[...] = jnp.zeros(total.shape, jnp.float32)

    for total, starts in ((results.bias, is_first_step), (results.scale, is_first_step & (t == 0))):
        if total is not None:
            pl.when(starts)(functools.partial(_clear, total))

    slab = _load(first, n, inputs, s.rows, s)
    columns = slab.keys.T if s.together > 1 else None
    for tile in reversed(s.sub_tiles(s.rows)):
        by_head = [
            _add_head(head, tile, slab, columns, inputs, results, keys_sum, values_sum, s)
            for head in range(s.together)
        ]
        d_q = by_head[0] if columns is None else _side_by_side(by_head, jnp.float32)
        results.q[tile.rows] = d_q.astype(results.q.dtype)

    if not s.window:

        @pl.when(t == pl.num_programs(1) - 1)
        def _finish_row() -> None:
            results.keys[...] = keys_sum[...].astype(results.keys.dtype)
            results.values[...] = values_sum[...].astype(results.values.dtype)

        return
    w = s.window
    d_keys = keys_sum[w:]
    if slab.inverse is not None:
        d_keys, _ = l2_normalize_rows_backward(inputs.keys[-1][...], d_keys, slab.inverse[w:])
    results.keys[...] = d_keys.astype(results.keys.dtype)
    results.values[...] = values_sum[w:].astype(results.values.dtype)
    for total in (keys_sum, values_sum):
        total[w:] = total[:w]
        total[:w] = jnp.zeros((w, s.wide), jnp.float32)

    @pl.when(n == 0)
    def _write_cache_gradients() -> None:
        results.cached_keys[...] = keys_sum[w:].astype(results.cached_keys.dtype)
        results.cached_values[...] = values_sum[w:].astype(results.cached_values.dtype)


def _clear(total: Any) -> None:
    total[...] = jnp.zeros_like(total)


def _add_head(
    head: int, tile: SubTile, slab: Slab, columns: Array | None, inputs: SlabInputs,
    results: SlabGradients, keys_sum: Any, values_sum: Any, s: SlabSettings,
) -> Array:  # fmt: skip
    """Adds the contributions of a head's sub-tile to the gradients of keys, values, bias and scale.

    If a step has several heads, `columns` is the transposed keys of the slab, else None. Returns
    the gradient of the queries, [K, r] with `columns` and [r, K] without.
    """
    (q, inverse), d_out = inputs.query(head, tile.rows, s), s.only(head, inputs.gradient[tile.rows])
    if s.rate:
        d_out = (d_out.astype(jnp.float32) * (1 / (1 - s.rate))).astype(d_out.dtype)
    numbers = slice(head, head + 1), tile.rows
    lse, delta = from_bits(inputs.lse[numbers], jnp.float32), inputs.delta[numbers]
    weights = jnp.exp(slab.logits(head, tile, q, inputs, s) - lse)
    d_kept = dot_float32(slab.values[tile.keys], d_out, NT)
    d_logits = weights * (inputs.dropped(head, tile, d_kept, s) - delta)
    kept = inputs.dropped(head, tile, weights, s).astype(q.dtype)
    if results.bias is not None:
        place = (head,) if s.window else (head, slice(None), tile.rows)
        results.bias[place] += d_logits
    d_logits = d_logits.astype(q.dtype)
    # The schedule is shorter if these products come before the gradient of the queries.
    values_sum[tile.keys] += dot_float32(kept, d_out, NN)
    keys_sum[tile.keys] += dot_float32(d_logits, q, NN)
    if columns is not None:
        return dot_float32(columns[s.head_lanes(head), tile.keys], d_logits, NN)
    d_q = dot_float32(d_logits, slab.keys[tile.keys], TN)
    if inverse is None:
        return d_q
    d_q, products = l2_normalize_rows_backward(inputs.q[tile.rows], d_q, inverse)
    total = jnp.sum(products, axis=0, keepdims=True)
    results.scale[...] += jnp.broadcast_to(total, (1, LANES))
    return d_q * inputs.scale[:, :1]
