"""Bodies of the TPU kernels of clustered attention, for one head of a lane (row of the batch).

The module `clustered_tpu` describes the algorithm. In shapes, T is the number of queries, X the
number of keys, C the number of clusters, and K and E the widths of a key and of a value.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops.clustered_attention.shared_tpu import membership
from brt.ops.softmax import FLOOR
from brt.ops.tpu import LANES, NN, NT, TN, dot_float32, unrolled_loop

# A tile has this many logits, which fill half of the vector registers.
_TILE = 32 * 8 * LANES


class ClusteredKernelSettings(NamedTuple):
    """Static settings of the kernels.

    Attributes:
      used: the number of clusters before padding.
      interpret: True runs the kernels on any device, slowly.
    """

    used: int
    interpret: bool | pltpu.InterpretParams

    @property
    def clusters(self) -> int:
        """The number of clusters after padding to a multiple of 16, the number of rows of a vector
        register of bfloat16 numbers.
        """
        return -(-self.used // 16) * 16

    @property
    def tile(self) -> int:
        """The number of tokens (queries or keys) that the kernels process at once: a multiple of
        128, such that the logits of all clusters for these tokens fill half of the registers.
        """
        return max(_TILE // self.clusters // LANES, 1) * LANES

    def padding_multiple(self, tokens: int) -> int:
        """Returns the number of which the padded size of an axis of `tokens` tokens must be a
        multiple: 128 if all tokens fit into one tile, and otherwise the size of a tile.
        """
        return self.tile if tokens > self.tile else LANES


class ClusteredKernelInputs(NamedTuple):
    """Inputs of the kernels, with the shapes of one step of the grid (a head of a lane).

    The fields are references inside of a kernel, and complete arrays or block specs outside. The
    fields `gradient`, `centroids`, `centroid_outputs` and `statistics` are only for the backward
    pass, and None in the forward pass.

    Attributes:
      queries: [K, T].
      keys, values: [K, X] and [E, X].
      labels: [1, T], int32, the cluster of each query; at least C for padding.
      key_mask_bias: [1, X], float32, added to the logits of each key: 0, or for padding MASKED, a
        large negative number.
      gradient: [E, T], the gradient of the output.
      centroids: [C, K], float32, the mean query of each cluster.
      centroid_outputs: [C, E], float32, the attention output of the centroids.
      statistics: [C, 2], float32: the log-sum-exp of each centroid's logits, and 1 divided by the
        number of the cluster's queries.
    """

    queries: Any
    keys: Any
    values: Any
    labels: Any
    key_mask_bias: Any
    gradient: Any = None
    centroids: Any = None
    centroid_outputs: Any = None
    statistics: Any = None


class ClusteredKernelOutputs(NamedTuple):
    """Shapes of the outputs of the forward kernel for one step of the grid (one head of a lane).

    The block specs and the shapes of the complete outputs are made from these shapes.

    Attributes:
      y: [E, T], the attention output of the queries.
      centroids, centroid_outputs, statistics: residuals of the backward pass, as in
        `ClusteredKernelInputs`.
    """

    y: Any
    centroids: Any
    centroid_outputs: Any
    statistics: Any


def _tile_size(ref: Any, settings: ClusteredKernelSettings) -> int:
    return min(settings.tile, ref.shape[-1])


def _column_registers(x: Float[Array, "C N"]) -> list[Float[Array, "C 128"]]:
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _logits(inputs: ClusteredKernelInputs, centroids: Array, place: Any) -> Float[Array, "C N"]:
    keys = inputs.keys[:, place]
    return dot_float32(centroids.astype(keys.dtype), keys, NN) + inputs.key_mask_bias[:, place]


def forward_kernel(
    inputs: ClusteredKernelInputs,
    y: Any,
    centroids: Any,
    centroid_outputs: Any,
    statistics: Any,
    *,
    settings: ClusteredKernelSettings,
) -> None:
    """Writes the centroids, the attention output of each centroid, and the output of each query of
    one head of a lane (row of the batch).

    The output of a query is the attention output of the centroid of the query's cluster.

    Args:
      inputs: references to the inputs of one step of the grid.
      y, centroids, centroid_outputs, statistics: references to the outputs, as in
        `ClusteredKernelOutputs`.
      settings: static settings of the kernel.
    """
    query_tile, key_tile = (_tile_size(x, settings) for x in (inputs.queries, inputs.keys))
    steps, key_steps = inputs.queries.shape[1] // query_tile, inputs.keys.shape[1] // key_tile
    dtype, nothing = inputs.queries.dtype, jnp.zeros((settings.clusters, LANES), jnp.float32)
    centroids[...] = jnp.zeros_like(centroids)
    centroid_outputs[...] = jnp.zeros_like(centroid_outputs)

    def sum_members(i: Any, count: Array) -> Array:
        """Adds the i-th tile of queries to the sums of each cluster's queries in `centroids`.

        Returns `count`, the number of queries of each cluster so far, plus the numbers of this
        tile. `count` and the result have 128 partial sums for each cluster, [C, 128].
        """
        place = pl.ds(i * query_tile, query_tile)
        members = membership(inputs.labels, place, settings.clusters)
        centroids[...] += dot_float32(members.astype(dtype), inputs.queries[:, place], NT)
        return sum(_column_registers(members), start=count)

    count = jnp.sum(unrolled_loop(steps, sum_members, nothing), axis=1, keepdims=True)
    inverse = 1 / jnp.maximum(count, 1)
    centroids[...] = (centroids[...] * inverse).astype(dtype).astype(jnp.float32)
    means = centroids[...]

    def update_maximum(i: Any, top: Array) -> Array:
        """Returns `top`, the largest logit of each centroid so far, updated by the i-th tile of
        keys.

        `top` and the result have 128 partial maxima for each cluster, [C, 128].
        """
        logits = _logits(inputs, means, pl.ds(i * key_tile, key_tile))
        return functools.reduce(jnp.maximum, _column_registers(logits), top)

    top = jnp.max(unrolled_loop(key_steps, update_maximum, nothing + FLOOR), axis=1, keepdims=True)

    def add_values(i: Any, total: Array) -> Array:
        """Adds the values of the i-th tile of keys, multiplied by the softmax weights before their
        normalization, to `centroid_outputs`.

        Returns `total`, the sum of each centroid's weights so far, plus the weights of this tile.
        `total` and the result have 128 partial sums for each cluster, [C, 128].
        """
        place = pl.ds(i * key_tile, key_tile)
        weights = jnp.exp(_logits(inputs, means, place) - top)
        centroid_outputs[...] += dot_float32(weights.astype(dtype), inputs.values[:, place], NT)
        return sum(_column_registers(weights), start=total)

    total = jnp.sum(unrolled_loop(key_steps, add_values, nothing), axis=1, keepdims=True) + jnp.exp(
        FLOOR - top
    )
    centroid_outputs[...] = centroid_outputs[...] / total
    statistics[:, :1] = top + jnp.log(total)
    statistics[:, 1:] = inverse

    def copy_to_queries(i: Any, _: None) -> None:
        """Writes the output of the i-th tile of queries: for each query, the attention output of
        its cluster's centroid.
        """
        place = pl.ds(i * query_tile, query_tile)
        members = membership(inputs.labels, place, settings.clusters).astype(dtype)
        y[:, place] = dot_float32(centroid_outputs[...].astype(dtype), members, TN).astype(y.dtype)

    unrolled_loop(steps, copy_to_queries)


def backward_kernel(
    inputs: ClusteredKernelInputs,
    d_queries: Any,
    d_keys: Any,
    d_values: Any,
    sums: Any,
    *,
    settings: ClusteredKernelSettings,
) -> None:
    """Computes the gradients of queries, keys and values of one head of a lane (row of the batch).

    Args:
      inputs: references to the inputs of one step of the grid.
      d_queries, d_keys, d_values: references to the gradients [K, T], [K, X] and [E, X].
      sums: [C, K], float32 scratch memory for the gradient of the centroids.
      settings: static settings of the kernel.
    """
    query_tile, key_tile = (_tile_size(x, settings) for x in (inputs.queries, inputs.keys))
    steps, key_steps = inputs.queries.shape[1] // query_tile, inputs.keys.shape[1] // key_tile
    dtype = inputs.queries.dtype

    def sum_gradients(i: Any, results: Array) -> Array:
        """Returns `results`, the sum [C, E] of the output gradients of each cluster's members so
        far, plus the output gradients of the i-th tile of queries.
        """
        place = pl.ds(i * query_tile, query_tile)
        members = membership(inputs.labels, place, settings.clusters).astype(dtype)
        return results + dot_float32(members, inputs.gradient[:, place], NT)

    d_outputs = unrolled_loop(
        steps, sum_gradients, jnp.zeros(inputs.centroid_outputs.shape, jnp.float32)
    )
    weighted_gradient_sum = jnp.sum(d_outputs * inputs.centroid_outputs[...], axis=1, keepdims=True)
    d_outputs, means = d_outputs.astype(dtype), inputs.centroids[...].astype(dtype)
    sums[...] = jnp.zeros_like(sums)

    def write_key_gradients(i: Any, _: None) -> None:
        """Writes the gradients of the i-th tile of keys and values, and adds the tile's
        contribution to the centroids' gradients.
        """
        place = pl.ds(i * key_tile, key_tile)
        weights = jnp.exp(_logits(inputs, means, place) - inputs.statistics[:, :1])
        d_logits = weights * (
            dot_float32(d_outputs, inputs.values[:, place], NN) - weighted_gradient_sum
        )
        weights, d_logits = weights.astype(dtype), d_logits.astype(dtype)
        d_values[:, place] = dot_float32(d_outputs, weights, TN).astype(dtype)
        d_keys[:, place] = dot_float32(means, d_logits, TN).astype(dtype)
        sums[...] += dot_float32(d_logits, inputs.keys[:, place], NT)

    unrolled_loop(key_steps, write_key_gradients)
    d_means = (sums[...] * inputs.statistics[:, 1:]).astype(dtype)

    def copy_to_queries(i: Any, _: None) -> None:
        """Writes the gradients of the i-th tile of queries: for each query, the gradient of its
        cluster's centroid divided by the number of the cluster's members.
        """
        place = pl.ds(i * query_tile, query_tile)
        members = membership(inputs.labels, place, settings.clusters).astype(dtype)
        d_queries[:, place] = dot_float32(d_means, members, TN).astype(dtype)

    unrolled_loop(steps, copy_to_queries)
