"""Bodies of the GPU kernels of attention; see `gpu` for the algorithm.

One warpgroup runs a kernel for one tile of the outputs, in a loop over tiles of the inputs. Inputs
and outputs are in global memory. In shared memory, each input that changes in the loop has one or
several slots, each with room for the tile of a step. While the warpgroup computes with the tiles in
one slot, the tiles of later steps are copied to the other slots. In shapes, R and C are the numbers
of rows and columns of a tile of logits, and P is the number of columns of a part of vectors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from brt.ops import dropout_hash
from brt.ops.attention.gpu_inputs import (
    LOG2E,
    TILE,
    KernelInputs,
    KernelSettings,
    opaque_zero,
)
from brt.ops.attention.gpu_tiles import (
    CopyRing,
    accumulate,
    barrier_wait,
    broadcast_rows,
    constant,
    copy_numbers,
    copy_square,
    copy_vectors,
    program_place,
    read_by_column,
    read_by_row,
    read_numbers,
    tile_places,
    tile_product,
    wgmma,
    write_square,
    write_vectors,
)
from brt.ops.softmax import FLOOR, MASKED

QUERY_SIDE = "q", "gradient", "sums", "spans", "draws", "query_norms"
KEY_SIDE = "keys", "values", "key_norms"


class Program(NamedTuple):
    """What one program of a kernel computes with."""

    inputs: KernelInputs
    settings: KernelSettings
    buffers: dict[str, Any]  # maps the name of each input to its shared memory [slots, ...]
    resident: Sequence[str]  # the inputs that have a single tile, which stays in slot 0
    ring: Sequence[str]  # the inputs whose tiles are copied in each step of the loop
    ready: Any  # the barrier at which the copies before the loop arrive
    arrived: Any  # a barrier for each slot, at which the copies of a step arrive
    transposed: bool  # True if tiles of logits have keys as rows and queries as columns

    def load_resident(self, pair: "TilePair") -> None:
        pair.start_copies(self.resident, self.ready)
        barrier_wait(self.ready)

    def run_steps(
        self,
        count: Any,
        pair_of_step: Callable[[Any, Any], "TilePair"],
        step: Callable[["TilePair", Any], Any],
        carry: Any = (),
    ) -> Any:
        """Returns the final carry of `carry = step(pair, carry)` for the pairs of `count` steps.

        `pair_of_step(n, slot)` returns the pair of step n, whose tiles are in the given slot.
        """

        def copy(n: Any, slot: Any, barrier: Any) -> None:
            pair_of_step(n, slot).start_copies(self.ring, barrier)

        def run_step(n: Array, slot: Array, carry: Any) -> Any:
            return step(pair_of_step(n, slot), carry)

        return CopyRing(self.arrived, copy).run_steps(count, run_step, carry)


class TilePair(NamedTuple):
    """Query tile i and key tile j of a head and a row of the batch, in step n of a loop."""

    program: Program
    lane: Any  # the index of the row of the batch
    head: Any  # the index of the head of queries
    i: Any
    j: Any
    n: Any = 0
    slot: Any = 0

    def place(self, name: str) -> tuple[Any, Any, Any]:
        """Returns the place of the pair's tile in the input `name` (bias, mask or factors).

        The place is the index on the first axis of the input, and the row and column of the tile.
        """
        x = getattr(self.program.inputs, name)
        if name == "factors":
            period = x.shape[1] // TILE
            return self.head, jax.lax.rem(self.i, period), jax.lax.rem(self.j, period)
        if name == "bias":
            by_distance = self.program.settings.by_distance
            return (self.head, 0, self.j - self.i) if by_distance else (self.head, self.i, self.j)
        return self.lane, 0 if x.shape[1] == TILE else self.i, self.j

    def start_copies(self, names: Sequence[str], barrier: Any) -> None:
        """Starts the copies of the tiles of some inputs to their slots."""
        for name in names:
            x, to = getattr(self.program.inputs, name), self.program.buffers[name].at[self.slot]
            if name in ("keys", "values"):
                self._copy_keys(name, to, barrier)
            elif name == "key_norms":
                copy_numbers(x, (self.lane, self._key_head), self.j, to, barrier)
            elif name in ("q", "gradient"):
                copy_vectors(x, (self.lane, self.i, self.head), to, barrier)
            elif name in QUERY_SIDE:
                by_head = name in ("sums", "query_norms")
                place = (self.lane, self.head) if by_head else (self.lane,)
                copy_numbers(x, place, self.i, to, barrier)
            else:
                index, row, column = self.place(name)
                copy_square(x, index, row, column, to, barrier)

    @property
    def _key_head(self) -> Any:
        inputs = self.program.inputs
        members = inputs.q.shape[2] // inputs.keys.shape[2]
        return self.head if members == 1 else jax.lax.div(self.head, members)

    def _copy_keys(self, name: str, to: Any, barrier: Any) -> None:
        inputs, count = self.program.inputs, self.program.inputs.cached_tiles
        x, cached = getattr(inputs, name), getattr(inputs, f"cached_{name}")

        def copy(array: Any, tile: Any) -> None:
            copy_vectors(array, (self.lane, tile, self._key_head), to, barrier)

        if not count:
            copy(x, self.j)
            return
        pl.when(self.j < count)(lambda: copy(cached, self.j))
        pl.when(self.j >= count)(lambda: copy(x, self.j - count))

    def tile(self, name: str) -> Any:
        """Returns the shared memory of the pair's tile of an input."""
        slot = self.slot if name in self.program.ring else opaque_zero(self.n)
        return self.program.buffers[name].at[slot]

    def has(self, name: str) -> bool:
        return getattr(self.program.inputs, name) is not None

    def product(self, of_queries: str, of_keys: str) -> Float[Array, "R C"]:
        """Returns the dot products of the vectors of two named inputs, laid out as logits."""
        pair = self.tile(of_queries), self.tile(of_keys)
        return tile_product(*(reversed(pair) if self.program.transposed else pair))

    def by_query(self, name: str, number: int) -> Array:
        """Returns one of two numbers of each query, broadcast to the shape of the logits.

        `name` is an input with two numbers for each query, such as "spans"; `number` is 0 or 1.
        """
        read = read_by_column if self.program.transposed else read_by_row
        return read(self.tile(name).at[number])

    def by_key(self, name: str, number: int) -> Array:
        """Returns one of two numbers of each key, broadcast to the shape of the logits."""
        read = read_by_row if self.program.transposed else read_by_column
        return read(self.tile(name).at[number])

    def key_places(self) -> Int[Array, "R C"]:
        return self.j * TILE + tile_places(0 if self.program.transposed else 1)

    def logits(self) -> Float[Array, "R C"]:
        logits = self.product("q", "keys")
        if self.has("query_norms"):
            logits = logits * self.by_query("query_norms", 0) * self.by_key("key_norms", 0)
        for name in ("bias", "mask"):
            if self.has(name):
                logits = logits + self.tile(name)[...].astype(jnp.float32)
        if self.has("spans"):
            places = self.key_places()
            seen = (self.by_query("spans", 0) <= places) & (places < self.by_query("spans", 1))
            logits = jnp.where(seen, logits, MASKED)
        return logits

    def drop(self, weights: Float[Array, "R C"]) -> Float[Array, "R C"]:
        """Applies dropout to weights, or to gradients of weights."""
        if self.has("factors"):
            weights = weights * self.tile("factors")[...]
        if self.has("draws"):
            rate, keys = self.program.settings.rate, self.program.inputs.keys.shape[1]
            words = self.by_query("draws", 0), self.by_query("draws", 1)
            kept = dropout_hash.kept(self.head * keys + self.key_places(), *words, rate)
            weights = jnp.where(kept, weights * (1 / (1 - rate)), 0.0)
        return weights

    def d_logits(self, use_weights: Callable[[Array], None] | None = None) -> Float[Array, "R C"]:
        """Returns the gradient of logits; calls `use_weights` with the weights after dropout."""
        weights = jnp.exp2(LOG2E * (self.logits() - self.by_query("sums", 0)))
        if use_weights is not None:
            use_weights(self.drop(weights))
        d_weights = self.drop(self.product("gradient", "values"))
        return weights * (d_weights - self.by_query("sums", 1))


def _range(ranges: Any, lane: Any, tile: Any) -> tuple[Array, Array]:
    return ranges[lane, tile, 0], ranges[lane, tile, 1]


def attention_forward(program: Program, y: Any, lse: Any) -> None:
    """Writes a tile of y [B, T, H, K] and of the log-sum-exp [B, H, I, TILE]."""
    lane, head, i = program_place()
    begin, end = _range(program.inputs.key_tiles, lane, i)
    queries, values = program.buffers["q"], program.buffers["values"]
    width = queries.shape[3]
    program.load_resident(TilePair(program, lane, head, i, 0))

    # Each accumulator in `read` is for a part of the columns of the values.
    def attend(*read: Any) -> tuple[Array, Array]:
        def add_key_tile(pair: TilePair, carry: tuple) -> tuple:
            top, total = carry
            logits = pair.logits()
            higher = jnp.maximum(top, LOG2E * jnp.max(logits, axis=1))
            weights = jnp.exp2(LOG2E * logits - broadcast_rows(higher))
            shrunk = jnp.exp2(top - higher)
            total = total * shrunk + jnp.sum(weights, axis=1)
            weights = pair.drop(weights).astype(values.dtype)
            for part, sums in enumerate(read):
                sums[...] = sums[...] * broadcast_rows(shrunk, width)
                wgmma(sums, weights, values.at[pair.slot, part])
            return higher, total

        # The running softmax starts with an additional logit, `softmax.FLOOR`, which belongs to no
        # key. In rows without visible keys, this logit has all the weight, so that the output is
        # zero. In other rows its weight is zero, because FLOOR is far below the logits of visible
        # keys.
        # The carry has, for each row, the largest logit times log2(e), and the sum of the weights.
        start = constant(LOG2E * FLOOR, TILE), constant(1.0, TILE)

        def pair_of_step(n: Any, slot: Any) -> TilePair:
            return TilePair(program, lane, head, i, begin + n, n, slot)

        return program.run_steps(end - begin, pair_of_step, add_key_tile, start)

    read, (top, total) = accumulate(queries.shape[1], width, attend)
    lse[lane, head, i] = top / LOG2E + jnp.log(total)
    share = broadcast_rows(1.0 / total, width)
    write_vectors([x * share for x in read], queries.at[0], y, (lane, i, head))


def _normalized_gradient(
    vectors: Any, norms: Any, sums: Float[Array, "R P"]
) -> tuple[Float[Array, "R P"], Float[Array, " R"]]:
    """Returns the gradient of the vectors, and each vector's dot product with its row of `sums`.

    Args:
      vectors: the vectors before normalization, in one part, in shared memory.
      norms: `query_norms` or `key_norms` of these vectors (see `KernelInputs`).
      sums: the gradient of the normalized vectors, which are the vectors times norms[0].
    """
    x, width = vectors[...].astype(jnp.float32), sums.shape[1]
    along = jnp.sum(x * sums, axis=1)
    factor, squared = (read_numbers(norms.at[n]) for n in (0, 1))
    across = sums - x * broadcast_rows(along * squared, width)
    return across * broadcast_rows(factor, width), along


def attention_queries(program: Program, d_q: Any, d_factors: Any = None) -> None:
    """Writes a tile of the gradients of the queries, d_q [B, T, H, K].

    If queries are normalized, also writes the gradients of the factors that normalize them,
    d_factors [B, H, I, TILE].
    """
    lane, head, i = program_place()
    begin, end = _range(program.inputs.key_tiles, lane, i)
    queries, keys = program.buffers["q"], program.buffers["keys"]
    program.load_resident(TilePair(program, lane, head, i, 0))

    def sum_gradients(*totals: Any) -> None:
        def add_key_tile(pair: TilePair, carry: tuple) -> tuple:
            d_logits = pair.d_logits()
            if pair.has("key_norms"):
                d_logits = d_logits * pair.by_key("key_norms", 0)
            d_logits = d_logits.astype(queries.dtype)
            for part, total in enumerate(totals):
                wgmma(total, d_logits, keys.at[pair.slot, part])
            return carry

        def pair_of_step(n: Any, slot: Any) -> TilePair:
            return TilePair(program, lane, head, i, begin + n, n, slot)

        program.run_steps(end - begin, pair_of_step, add_key_tile)

    results, _ = accumulate(queries.shape[1], queries.shape[3], sum_gradients)
    if d_factors is not None:
        norms = program.buffers["query_norms"].at[0]
        results[0], d_factors[lane, head, i] = _normalized_gradient(
            queries.at[0, 0], norms, results[0]
        )
    write_vectors(results, queries.at[0], d_q, (lane, i, head))


def attention_keys(program: Program, d_keys: Any, d_values: Any, *, first: int) -> None:
    """Writes one part of the columns of a tile of d_keys and d_values, for one head of queries.

    Both arrays have as many heads as the queries, and begin with tile `first` of the S keys.

    If a head is wide, not all columns fit into the registers of one program. A program therefore
    computes only one part of the columns. The program's index along the last axis of the grid says
    which tile and which part it computes.
    """
    lane, head, index = program_place()
    keys, values = program.buffers["keys"], program.buffers["values"]
    queries, gradient = program.buffers["q"], program.buffers["gradient"]
    tile, part = jax.lax.div(index, keys.shape[1]), jax.lax.rem(index, keys.shape[1])
    j = first + tile
    begin, end = _range(program.inputs.query_tiles, lane, j)
    program.load_resident(TilePair(program, lane, head, 0, j))

    def sum_gradients(keys_total: Any, values_total: Any) -> None:
        def add_query_tile(pair: TilePair, carry: tuple) -> tuple:
            def add_values(weights: Array) -> None:
                wgmma(values_total, weights.astype(keys.dtype), gradient.at[pair.slot, part])

            d_logits = pair.d_logits(add_values)
            if pair.has("query_norms"):
                d_logits = d_logits * pair.by_query("query_norms", 0)
            wgmma(keys_total, d_logits.astype(keys.dtype), queries.at[pair.slot, part])
            return carry

        def pair_of_step(n: Any, slot: Any) -> TilePair:
            return TilePair(program, lane, head, begin + n, j, n, slot)

        program.run_steps(end - begin, pair_of_step, add_query_tile)

    (keys_total, values_total), _ = accumulate(2, keys.shape[3], sum_gradients)
    if program.inputs.key_norms is not None:
        norms = program.buffers["key_norms"].at[0]
        keys_total, _ = _normalized_gradient(keys.at[0, 0], norms, keys_total)
    write_vectors([keys_total], keys.at[0], d_keys, (lane, tile, head), part)
    write_vectors([values_total], values.at[0], d_values, (lane, tile, head), part)


def attention_bias(program: Program, d_bias: Any, *, steps: int) -> None:
    """Writes a part of the gradient of one tile of the bias to d_bias [N, H, ...].

    The gradient is a sum over all pairs of a query tile and a key tile that read the tile of the
    bias. The pairs form N groups of `steps` pairs. A program computes the sum of one group, and the
    caller adds up the groups. If the bias depends on the distance, a group has the pairs of
    consecutive query tiles of a row of the batch. Otherwise, there is one group, with one pair for
    each row.
    """
    group, head, index = program_place()
    rows, columns = (x.shape[1] // TILE for x in (program.inputs.q, program.inputs.keys))

    def pair_of_step(n: Any, slot: Any) -> TilePair:
        if program.settings.by_distance:
            groups = rows // steps
            i = jax.lax.rem(group, groups) * steps + n
            return TilePair(program, jax.lax.div(group, groups), head, i, i + index, n, slot)
        i, j = jax.lax.div(index, columns), jax.lax.rem(index, columns)
        return TilePair(program, n, head, i, j, n, slot)

    def add_pair(pair: TilePair, total: Array) -> Array:
        begin, end = _range(program.inputs.key_tiles, pair.lane, pair.i)
        is_visited = (begin <= pair.j) & (pair.j < end)
        return total + jnp.where(is_visited, pair.d_logits(), 0.0)

    first = pair_of_step(0, 0)
    program.load_resident(first)
    total = program.run_steps(steps, pair_of_step, add_pair, constant(0.0, TILE, TILE))
    write_square(total, program.buffers["bias"].at[0], d_bias, (group, *first.place("bias")))
