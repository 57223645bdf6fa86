"""What both passes of improved clustered attention on a TPU share: see `improved_tpu`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from brt.ops.clustered_attention import shared_tpu
from brt.ops.clustered_attention.best_tpu import SUBLANES
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.tpu import LANES, TN, dot_float32

AT_ONCE = 4  # of the best keys
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
      results: see `Found`.
    """

    queries: Any
    keys: Any
    values: Any
    labels: Any
    unseen: Any
    gradient: Any = None
    results: Any = None


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


def members_of(inputs: Inputs, place: Any) -> Float[Array, "C N"]:
    """1 where a query is of a cluster."""
    return shared_tpu.members_of(inputs.labels, place, CLUSTERS).astype(inputs.queries.dtype)


def logits_of(inputs: Inputs, means: Float[Array, "K C"], place: Any) -> Float[Array, "X C"]:
    unseen = inputs.unseen[:, place]
    unseen = jnp.broadcast_to(unseen, (CLUSTERS, unseen.shape[1]))
    return dot_float32(inputs.keys[:, place], means, TN) + unseen.T


def picked(table: Array, lanes: Int[Array, "W 128"]) -> Array:
    return jnp.take_along_axis(table, lanes, axis=1, mode="promise_in_bounds")


def own_of(table: Array, labels: Int[Array, "1 128"]) -> Array:
    """What queries' clusters have, of [W, C]; for padding anything."""
    return picked(table, jnp.broadcast_to(labels & CLUSTERS - 1, table.shape))


class Tile:
    """128 queries, and what their clusters have."""

    def __init__(self, inputs: Inputs, results: Found, step: Any) -> None:
        self.place = pl.ds(step * LANES, LANES)
        self.labels = inputs.labels[:, self.place]
        self.queries = inputs.queries[:, self.place].astype(jnp.float32)
        numbers = own_of(results.numbers[...], self.labels)
        self.numbers = Numbers(*(numbers[i : i + 1] for i in range(len(Numbers._fields))))
        self._words, self._dtype = results.words, inputs.keys.dtype
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
