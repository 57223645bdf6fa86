"""What a TPU does for one head of a lane of improved clustered attention: see `improved_tpu`.

The way back is in `improved_backward`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from brt.ops.clustered_attention import best_tpu
from brt.ops.clustered_attention.best_tpu import KEYS, LENGTH, NOWHERE, SUBLANES
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.tpu import BY_ROW, BY_SLOT, LANES, PLAIN, each, product

COLUMN = LANES.bit_length() - 1
AT_ONCE = 4
CLUSTERS = LANES  # what they have is a register that queries look up their own in


class Static(NamedTuple):
    """What is known when tracing; of `used` clusters."""

    used: int
    top_k: int
    mass_stop_gradient: bool
    interpret: bool | pltpu.InterpretParams


class Found(NamedTuple):
    """What the forward pass finds out about clusters, which fill the lanes.

    Attributes:
      means: [K, C], float32.
      rest: [E, C], float32, what these read from all but their best keys.
      numbers: [8, C], float32, those of `Numbers`.
      bits: [X / 32, C], int32: bit j of row i is of key 256 (i // 8) + 8 j + i % 8.
      places: [32, C], int32, of the best keys; X where there are fewer.
      words: [32, W, C], int32, the numbers of the best keys, and below them of their values.
    """

    means: Any
    rest: Any
    numbers: Any
    bits: Any
    places: Any
    words: Any


class Inputs(NamedTuple):
    """Of a step of the grid, a head of a lane, or where they are.

    Attributes:
      queries, keys, values: [K, T], [K, X] and [E, X].
      labels: [1, T], int32, beyond all clusters for padding.
      unseen: [1, X], float32, added to logits.
      gradient: [E, T], of it the rest, in the backward pass only.
      found: see `Found`.
    """

    queries: Any
    keys: Any
    values: Any
    labels: Any
    unseen: Any
    gradient: Any = None
    found: Any = None


class Numbers(NamedTuple):
    """Of clusters, or of each query's.

    Attributes:
      best, rest: log-sum-exp of a centroid's logits, of its best keys and of all others.
      inverse: of how many members there are.
      chosen: how many best keys there are.
    """

    rest: Float[Array, "1 C"]
    best: Float[Array, "1 C"]
    inverse: Float[Array, "1 C"]
    chosen: Float[Array, "1 C"]

    @property
    def mass(self) -> Float[Array, "1 C"]:
        """Of the best keys."""
        return jax.nn.sigmoid(self.best - self.rest)


def forward_kernel(
    inputs: Inputs, y: Any, found: Found, logits: Any, lists: Any, packed: Any, rows: Any, *,
    static: Static,
) -> None:  # fmt: skip
    """Memory: `logits` [X, C], `lists` [256, C] and `rows` [8 R, 128], float32; `packed` [W, X]."""
    counts = _find_means(inputs, found.means)
    means = found.means[...].astype(inputs.keys.dtype)

    def weigh(step: Any, _: None) -> None:
        place = pl.ds(step * KEYS, KEYS)
        logits[place] = logits_of(inputs, means, place)

    each(logits.shape[0] // KEYS, weigh)
    best, count = _choose(logits, lists, counts, found, static)
    rest = _read_rest(inputs, logits, found.rest)
    numbers = Numbers(rest, best, 1 / jnp.maximum(counts[:1], 1), count)
    found.numbers[...] = jnp.concatenate([*numbers, jnp.zeros((4, CLUSTERS))], axis=0)
    _gather(inputs, packed, found, static)
    common = (1 - numbers.mass) * found.rest[...]

    def attend(step: Any, _: None) -> None:
        tile = Tile(inputs, found, step)
        for r in range(static.top_k):
            rows[eight_rows(r)] = tile.along(tile.queries, tile.keys(r))
        weights = tile.weights(added(rows)) * tile.numbers.mass
        read = own_of(common, tile.labels)
        for r in range(static.top_k):
            read += weights[r : r + 1] * tile.values(r)
        y[:, tile.place] = jnp.where(tile.labels < static.used, read, 0).astype(y.dtype)

    jax.lax.fori_loop(0, y.shape[1] // LANES, attend, None)


def _find_means(inputs: Inputs, means: Any) -> Float[Array, "8 C"]:
    """And how many members there are."""
    dtype = inputs.queries.dtype
    ones = jnp.ones((16, KEYS), dtype)
    means[...] = jnp.zeros_like(means)

    def gather(step: Any, counts: Array) -> Array:
        place = pl.ds(step * KEYS, KEYS)
        members = members_of(inputs, place)
        means[...] += product(inputs.queries[:, place], members, BY_ROW)
        return counts + product(ones, members, BY_ROW)

    steps = inputs.queries.shape[1] // KEYS
    counts = each(steps, gather, jnp.zeros((16, CLUSTERS), jnp.float32))[:SUBLANES]
    divided = means[...] / jnp.maximum(counts[:1], 1)
    means[...] = divided.astype(dtype).astype(jnp.float32)
    return counts


def members_of(inputs: Inputs, place: Any) -> Float[Array, "C N"]:
    """1 where a query is of a cluster."""
    own = inputs.labels[:, place]
    cluster = jax.lax.broadcasted_iota(jnp.int32, (CLUSTERS, own.shape[1]), 0)
    return jnp.where(cluster == own, 1.0, 0.0).astype(inputs.queries.dtype)


def logits_of(inputs: Inputs, means: Float[Array, "K C"], place: Any) -> Float[Array, "X C"]:
    unseen = inputs.unseen[:, place]
    unseen = jnp.broadcast_to(unseen, (CLUSTERS, unseen.shape[1]))
    return product(inputs.keys[:, place], means, BY_SLOT) + unseen.T


def _choose(
    logits: Any, lists: Any, counts: Float[Array, "8 C"], found: Found, static: Static
) -> tuple[Float[Array, "1 C"], Float[Array, "1 C"]]:
    """Finds the best keys and masks their logits; what they weigh together, and how many."""
    steps, lanes = logits.shape[0] // KEYS, logits.shape[1]
    values = best_tpu.largest(steps, lambda step: best_tpu.rows_of(logits, step), lists)
    least, end = best_tpu.threshold(logits, values, counts, static.top_k)

    def split(step: Any) -> Array:
        rows, places = best_tpu.rows_of(logits, step), best_tpu.places_of(step, lanes)
        best = best_tpu.is_best(rows, places, least, end)
        masked = jnp.where(best, MASKED, rows)
        logits[pl.ds(step * KEYS, KEYS)] = masked.reshape(KEYS, lanes)
        ones = jnp.where(best, 1, 0)
        bits = functools.reduce(jnp.bitwise_or, (ones[j] << j for j in range(LENGTH)))
        found.bits[pl.ds(step * SUBLANES, SUBLANES)] = bits
        return jnp.where(best, -places, -NOWHERE)

    places = -best_tpu.largest(steps, split, lists)[:, 0]
    found.places[...] = jnp.minimum(places, logits.shape[0]).astype(jnp.int32)
    count = jnp.sum(jnp.where(places < NOWHERE, 1.0, 0.0), axis=0, keepdims=True)
    values = values[: static.top_k, 0]
    top = jnp.maximum(values[:1], FLOOR)
    total = jnp.sum(jnp.exp(values - top), axis=0, keepdims=True) + jnp.exp(FLOOR - top)
    return top + jnp.log(total), count


def _read_rest(inputs: Inputs, logits: Any, rest: Any) -> Float[Array, "1 C"]:
    """And what it weighs."""
    steps = logits.shape[0] // KEYS

    def highest(step: Any, top: Array) -> Array:
        return jnp.maximum(top, jnp.max(best_tpu.rows_of(logits, step), axis=0))

    top = each(steps, highest, jnp.full((SUBLANES, CLUSTERS), FLOOR))
    top = jnp.max(top, axis=0, keepdims=True)
    rest[...] = jnp.zeros_like(rest)

    def weigh(step: Any, total: Array) -> Array:
        place = pl.ds(step * KEYS, KEYS)
        weights = jnp.exp(logits[place] - top)
        rest[...] += product(inputs.values[:, place], weights.astype(inputs.values.dtype), PLAIN)
        return total + jnp.sum(weights, axis=0, keepdims=True)

    total = each(steps, weigh, jnp.zeros_like(top)) + jnp.exp(FLOOR - top)
    rest[...] = rest[...] / total
    return top + jnp.log(total)


def _gather(inputs: Inputs, packed: Any, found: Found, static: Static) -> None:
    """Best keys and values: of some places in a list at a time, from 128 keys after the other."""
    size = inputs.keys.shape[0] * inputs.keys.dtype.itemsize // 4
    steps = inputs.keys.shape[1] // LANES

    def pack(step: Any, _: None) -> None:
        at = pl.ds(step * LANES, LANES)
        packed[:size, at] = pltpu.bitcast(inputs.keys[:, at], jnp.int32)
        packed[size:, at] = pltpu.bitcast(inputs.values[:, at], jnp.int32)

    each(steps, pack)

    def some(group: Any, _: None) -> None:
        shape = packed.shape[0], CLUSTERS
        rows = [group * AT_ONCE + j for j in range(AT_ONCE)]
        places = [jnp.broadcast_to(found.places[pl.ds(r, 1)], shape) for r in rows]

        def look(step: Any, words: list[Array]) -> list[Array]:
            here = packed[:, pl.ds(step * LANES, LANES)]
            return [
                jnp.where(place >> COLUMN == step, _picked(here, place & LANES - 1), old)
                for place, old in zip(places, words, strict=True)
            ]

        nothing = [jnp.zeros(shape, jnp.int32)] * AT_ONCE
        words = jax.lax.fori_loop(0, steps, look, nothing, unroll=2)
        for r, of_place in zip(rows, words, strict=True):
            found.words[r] = of_place

    jax.lax.fori_loop(0, -(-static.top_k // AT_ONCE), some, None)


def _picked(table: Array, lanes: Int[Array, "W 128"]) -> Array:
    return jnp.take_along_axis(table, lanes, axis=1, mode="promise_in_bounds")


def own_of(table: Array, labels: Int[Array, "1 128"]) -> Array:
    """What queries' clusters have, of [W, C]; for padding anything."""
    return _picked(table, jnp.broadcast_to(labels & CLUSTERS - 1, table.shape))


class Tile:
    """128 queries, and what their clusters have."""

    def __init__(self, inputs: Inputs, found: Found, step: Any) -> None:
        self.place = pl.ds(step * LANES, LANES)
        self.labels = inputs.labels[:, self.place]
        self.queries = inputs.queries[:, self.place].astype(jnp.float32)
        numbers = own_of(found.numbers[...], self.labels)
        self.numbers = Numbers(*(numbers[i : i + 1] for i in range(len(Numbers._fields))))
        self._words, self._dtype = found.words, inputs.keys.dtype
        self._keys = inputs.keys.shape[0] * inputs.keys.dtype.itemsize // 4

    def keys(self, r: int) -> Float[Array, "K 128"]:
        """The best but r of every query's cluster."""
        return self._unpacked(self._words[r, : self._keys])

    def values(self, r: int) -> Float[Array, "E 128"]:
        return self._unpacked(self._words[r, self._keys :])

    def _unpacked(self, words: Int[Array, "W C"]) -> Array:
        return pltpu.bitcast(own_of(words, self.labels), self._dtype).astype(jnp.float32)

    @staticmethod
    def along(a: Float[Array, "K 128"], b: Float[Array, "K 128"]) -> Float[Array, "8 128"]:
        """Products of vectors but for the sum over sublanes, see `added`."""
        return jnp.sum((a * b).reshape(-1, SUBLANES, LANES), axis=0)

    def weights(self, logits: Float[Array, "R 128"]) -> Float[Array, "R 128"]:
        """Of best keys."""
        place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0).astype(jnp.float32)
        seen = jnp.where(place < self.numbers.chosen, logits, MASKED)
        top = jnp.maximum(jnp.max(seen, axis=0, keepdims=True), FLOOR)
        weights = jnp.exp(seen - top)
        return weights / (jnp.sum(weights, axis=0, keepdims=True) + jnp.exp(FLOOR - top))


def eight_rows(r: int) -> slice:
    return slice(r * SUBLANES, (r + 1) * SUBLANES)


def added(rows: Any) -> Float[Array, "R 128"]:
    """Sums of eight rows each."""
    count = rows.shape[0] // SUBLANES
    return sum(rows[pl.ds(j, count, stride=SUBLANES)] for j in range(SUBLANES))
