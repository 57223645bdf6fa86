"""Functions that both passes of improved clustered attention on TPUs share.

The module `improved_tpu` describes the algorithm. In shapes, T is the number of queries, X of keys,
C of clusters, R of best keys of a cluster, and W of 32-bit words of a key and its value; K and E
are the widths of a key and of a value.
"""

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

KEYS_AT_ONCE = 4  # Loops over the best keys process this many keys of each cluster at once.
# The kernels always have 128 clusters, one for each lane of a vector register, because a query
# looks up the data of its cluster by the index of a lane. If there are fewer clusters, the others
# are empty.
CLUSTERS = LANES


class ImprovedKernelSettings(NamedTuple):
    """Static settings of the kernels.

    Attributes:
      used: the number of clusters that queries may belong to; the kernels have `CLUSTERS` clusters,
        of which all others are empty.
      top_k: the number of best keys of a cluster.
      mass_stop_gradient: True gives the total weight of the best keys no gradient.
      interpret: True runs the kernels on any device, slowly.
    """

    used: int
    top_k: int
    mass_stop_gradient: bool
    interpret: bool | pltpu.InterpretParams


class ClusterResults(NamedTuple):
    """Results of the forward pass for each cluster; clusters are along the lanes of registers.

    Attributes:
      means: [K, C], float32, the centroids.
      rest: [E, C], float32, attention outputs of the centroids over all but their best keys.
      statistics: [8, C], float32, the four fields of `CentroidStatistics` and four rows of zeros.
      bits: [X / 32, C], int32, one bit for each key, set for the best keys: bit j of row i belongs
        to key 256 (i // 8) + 8 j + i % 8.
      places: [32, C], int32, positions of the best keys, in ascending order. If there are fewer
        than 32, the other places have the number X.
      words: [32, W, C], int32, the bits of each best key in the same order, followed by the bits of
        its value, in W words of 32 bits.
    """

    means: Any
    rest: Any
    statistics: Any
    bits: Any
    places: Any
    words: Any


class ImprovedKernelInputs(NamedTuple):
    """Inputs of the kernels, with the shapes of one step of the grid (a head of a lane, that is, of
    a row of the batch).

    The fields are references inside of a kernel, and complete arrays or block specs outside. The
    fields `gradient` and `results` are only for the backward pass, and None in the forward pass.

    Attributes:
      queries: [K, T].
      keys, values: [K, X] and [E, X].
      labels: [1, T], int32, the cluster of each query; at least `CLUSTERS` for padding.
      key_mask_bias: [1, X], float32, added to the logits of each key: 0, or for padding MASKED, a
        large negative number.
      gradient: [E, T], the gradient of the output.
      results: a `ClusterResults`, the results of the forward pass.
    """

    queries: Any
    keys: Any
    values: Any
    labels: Any
    key_mask_bias: Any
    gradient: Any = None
    results: Any = None


class CentroidStatistics(NamedTuple):
    """Statistics of each cluster; or for each query, the statistics of its cluster.

    In the second case, the last axis of each field is queries instead of clusters.

    Attributes:
      rest: log-sum-exp of the centroid's logits of all but its best keys.
      best: log-sum-exp of the centroid's logits of its best keys.
      inverse: 1 divided by the number of the cluster's queries.
      chosen: the number of best keys, which is below `top_k` if there are fewer keys.
    """

    rest: Float[Array, "1 C"]
    best: Float[Array, "1 C"]
    inverse: Float[Array, "1 C"]
    chosen: Float[Array, "1 C"]

    @property
    def mass(self) -> Float[Array, "1 C"]:
        """The sum of the centroid's softmax weights of its best keys, from 0 to 1."""
        return jax.nn.sigmoid(self.best - self.rest)


def membership(inputs: ImprovedKernelInputs, place: Any) -> Float[Array, "C N"]:
    """Returns the membership matrix of clusters and queries: 1 where a query belongs to a cluster,
    0 elsewhere.

    Args:
      inputs: the inputs of the kernel. The matrix has the dtype of the queries.
      place: the slice of the N queries that the matrix is for.
    """
    return shared_tpu.membership(inputs.labels, place, CLUSTERS).astype(inputs.queries.dtype)


def centroid_logits(
    inputs: ImprovedKernelInputs, means: Float[Array, "K C"], place: Any
) -> Float[Array, "X C"]:
    """Returns the float32 logits of some keys for all centroids, one row for each of these keys.

    Args:
      inputs: the inputs of the kernel.
      means: the centroids.
      place: the slice of the head's keys that the logits are for; here X is the length of the
        slice.
    """
    key_mask_bias = inputs.key_mask_bias[:, place]
    key_mask_bias = jnp.broadcast_to(key_mask_bias, (CLUSTERS, key_mask_bias.shape[1]))
    return dot_float32(inputs.keys[:, place], means, TN) + key_mask_bias.T


def gather_lanes(table: Array, lanes: Int[Array, "W 128"]) -> Array:
    """Returns an array [W, 128] whose entry (i, j) is `table[i, lanes[i, j]]`.

    `table` is an array [W, 128], in which the second axis is the lanes of a vector register.
    """
    return jnp.take_along_axis(table, lanes, axis=1, mode="promise_in_bounds")


def gather_by_label(table: Array, labels: Int[Array, "1 128"]) -> Array:
    """Returns an array [W, 128] with a column for each of 128 queries, copied from the column of
    the query's cluster in an array [W, C].

    Args:
      table: [W, C], with a column for each cluster.
      labels: the cluster of each query. The result of a query that is padding has no meaning.
    """
    return gather_lanes(table, jnp.broadcast_to(labels & CLUSTERS - 1, table.shape))


class QueryTile:
    """A tile of 128 queries, with the best keys and the statistics of each query's cluster.

    Args:
      inputs: references to the inputs of one step of a kernel's grid.
      results: references to the best keys and the statistics of all clusters.
      step: the index of the tile; tile i has the queries from 128 i on.

    Attributes:
      place: the slice of the queries that belong to the tile.
      labels: [1, 128], the cluster of each query.
      queries: [K, 128], the queries in float32.
      statistics: the statistics of each query's cluster, as arrays [1, 128].
    """

    def __init__(self, inputs: ImprovedKernelInputs, results: ClusterResults, step: Any) -> None:
        self.place = pl.ds(step * LANES, LANES)
        self.labels = inputs.labels[:, self.place]
        self.queries = inputs.queries[:, self.place].astype(jnp.float32)
        statistics = gather_by_label(results.statistics[...], self.labels)
        self.statistics = CentroidStatistics(
            *(statistics[i : i + 1] for i in range(len(CentroidStatistics._fields)))
        )
        self._words, self._dtype = results.words, inputs.keys.dtype
        self._keys = inputs.keys.shape[0] * inputs.keys.dtype.itemsize // 4

    def keys(self, r: int) -> Float[Array, "K 128"]:
        """Returns, for each query, the r-th of its cluster's best keys in the order of positions,
        float32.
        """
        return self._unpacked(self._words[r, : self._keys])

    def values(self, r: int) -> Float[Array, "E 128"]:
        """Returns, for each query, the value of the r-th of its cluster's best keys in the order of
        positions, float32.
        """
        return self._unpacked(self._words[r, self._keys :])

    def _unpacked(self, words: Int[Array, "W C"]) -> Array:
        return pltpu.bitcast(gather_by_label(words, self.labels), self._dtype).astype(jnp.float32)

    @staticmethod
    def partial_dot_products(
        a: Float[Array, "K 128"], b: Float[Array, "K 128"]
    ) -> Float[Array, "8 128"]:
        """Returns the dot product of each column of a with the same column of b, as eight partial
        sums, which `add_partial_sums` adds up.
        """
        return jnp.sum((a * b).reshape(-1, SUBLANES, LANES), axis=0)

    def weights(self, logits: Float[Array, "R 128"]) -> Float[Array, "R 128"]:
        """Returns the weights of each query for the best keys of its cluster, from a softmax over
        these keys alone.

        Args:
          logits: the logits of each query for the R best keys of its cluster. If the cluster has
            fewer best keys, the last of the R logits have no meaning and get weight 0.
        """
        place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0).astype(jnp.float32)
        seen = jnp.where(place < self.statistics.chosen, logits, MASKED)
        top = jnp.maximum(jnp.max(seen, axis=0, keepdims=True), FLOOR)
        weights = jnp.exp(seen - top)
        return weights / (jnp.sum(weights, axis=0, keepdims=True) + jnp.exp(FLOOR - top))


def partial_sum_rows(r: int) -> slice:
    """Returns the slice of an array [8 R, 128] with the eight rows of partial sums of the dot
    products of 128 queries and the r-th of R best keys; `add_partial_sums` adds up all rows.
    """
    return slice(r * SUBLANES, (r + 1) * SUBLANES)


def add_partial_sums(rows: Any) -> Float[Array, "R 128"]:
    """Returns the dot products of 128 queries and R best keys, by adding up eight partial sums of
    each.

    Args:
      rows: reference to an array [8 R, 128], in which the partial sums of a dot product are in
        eight consecutive rows.
    """
    count = rows.shape[0] // SUBLANES
    return sum(rows[pl.ds(j, count, stride=SUBLANES)] for j in range(SUBLANES))
