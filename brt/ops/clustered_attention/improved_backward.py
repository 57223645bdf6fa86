"""Backward kernel of improved clustered attention on TPUs; `improved_tpu` describes the algorithm.

A query has exact weights for the best keys of its cluster, and shares the weights of the cluster's
centroid for all other keys. The mass of a cluster is the sum of the centroid's softmax weights of
the best keys. The gradient of a query therefore has two parts: the exact part, from the query's own
logits for the best keys, and the centroid's part, which is the gradient of the centroid divided by
the number of the cluster's members.

In shapes, T is the number of queries, X the number of keys, C the number of clusters, R the number
of best keys of a cluster, and K and E the widths of a key and of a value.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from brt.ops.clustered_attention.best_tpu import STEP_KEYS, SUBLANES
from brt.ops.clustered_attention.improved_tile import (
    CLUSTERS,
    KEYS_AT_ONCE,
    CentroidStatistics,
    ImprovedKernelInputs,
    ImprovedKernelSettings,
    QueryTile,
    add_partial_sums,
    centroid_logits,
    gather_by_label,
    membership,
    partial_sum_rows,
)
from brt.ops.tpu import LANES, NN, NT, TN, dot_float32, unrolled_loop


def backward_kernel(
    inputs: ImprovedKernelInputs,
    d_queries: Any,
    d_keys: Any,
    d_values: Any,
    d_best: Any,
    d_best_transposed: Any,
    d_tokens: Any,
    d_queries_exact: Any,
    rows: Any,
    shares: Any,
    sums: Any,
    *,
    settings: ImprovedKernelSettings,
) -> None:
    """Computes the gradients of queries, keys and values of one head of a lane (row of the batch).

    The arguments from `d_best` on are float32 scratch memory.

    Args:
      inputs: references to the inputs of one step of the grid, including the results of the
        forward pass.
      d_queries, d_keys, d_values: references to the gradients [K, T], [K, X] and [E, X].
      d_best: [R, K + E, C], the gradients of each cluster's best keys and of their values.
      d_best_transposed: [R, C, K + E], `d_best` with the last two axes exchanged.
      d_tokens: [X + 8, K + E], for each key and its value, the sum of the gradients from all
        clusters whose best keys include this key. Row X is for clusters with fewer than R best
        keys, whose lists of positions are filled up with X. The last 7 rows are padding.
      d_queries_exact: [K, T], the exact parts of the queries' gradients.
      rows: [2, 8 R, 128], dot products of 128 queries, each as eight partial sums in eight
        consecutive rows: first of the query and the R best keys, then of the gradient of the
        query's output and the R best values.
      shares: [3, max(R, 8), 256], for 256 queries: the gradients of the logits of the R best keys,
        the weights of these keys, and in 8 equal rows the gradient of the cluster's mass from each
        query.
      sums: [K, C], the gradients of the centroids.
      settings: static settings of the kernel.
    """
    results, (size, _) = inputs.results, inputs.keys.shape
    d_rest, d_mass = _backward_over_queries(inputs, d_best, d_queries_exact, rows, shares, settings)
    statistics = CentroidStatistics(
        *(results.statistics[i : i + 1] for i in range(len(CentroidStatistics._fields)))
    )
    mass = statistics.mass
    d_lse = (
        mass * (1 - mass) * (d_mass - jnp.sum(d_rest * results.rest[...], axis=0, keepdims=True))
    )
    d_rest = (1 - mass) * d_rest
    d_lse_rest = -d_lse - jnp.sum(d_rest * results.rest[...], axis=0, keepdims=True)
    _scatter_to_keys(results.places, d_best, d_best_transposed, d_tokens, settings)
    dtype = inputs.keys.dtype
    means, rest_part = results.means[...].astype(dtype), d_rest.astype(dtype)
    sums[...] = jnp.zeros_like(sums)

    def write_key_gradients(step: Any, _: None) -> None:
        """Writes the gradients of the 128 keys and values of tile number `step`, and adds the
        contribution of these keys to the gradients of the centroids.
        """
        place = pl.ds(step * LANES, LANES)
        best = _unpack_bits(results.bits, step)
        logits = centroid_logits(inputs, means, place)
        weights = jnp.exp(logits - jnp.where(best, statistics.best, statistics.rest))
        read = dot_float32(inputs.values[:, place], rest_part, TN) + d_lse_rest
        d_logits = (weights * jnp.where(best, d_lse, read)).astype(dtype)
        weights = jnp.where(best, 0, weights).astype(dtype)
        best_part = d_tokens[place].T
        d_keys[:, place] = (best_part[:size] + dot_float32(means, d_logits, NT)).astype(dtype)
        d_values[:, place] = (best_part[size:] + dot_float32(rest_part, weights, NT)).astype(dtype)
        sums[...] += dot_float32(inputs.keys[:, place], d_logits, NN)

    unrolled_loop(inputs.keys.shape[1] // LANES, write_key_gradients)
    d_means = sums[...] * statistics.inverse

    def write_query_gradients(step: Any, _: None) -> None:
        """Writes the gradients of the 128 queries of tile number `step`: for each query, the sum of
        its exact part and its centroid's part.
        """
        place = pl.ds(step * LANES, LANES)
        labels = inputs.labels[:, place]
        total = d_queries_exact[:, place] + gather_by_label(d_means, labels)
        d_queries[:, place] = jnp.where(labels < settings.used, total, 0).astype(dtype)

    unrolled_loop(d_queries.shape[1] // LANES, write_query_gradients)


def _backward_over_queries(
    inputs: ImprovedKernelInputs,
    d_best: Any,
    d_queries_exact: Any,
    rows: Any,
    shares: Any,
    settings: ImprovedKernelSettings,
) -> tuple[Float[Array, "E C"], Float[Array, "1 C"]]:
    """Returns, for each cluster, the sum of its members' output gradients and the gradient of its
    mass.

    An iteration computes the weights of 256 queries and the matrix products of the 256 queries
    before them, so that the products need not wait.
    """
    dtype, both = inputs.queries.dtype, d_best.shape[1]
    d_best[...] = jnp.zeros_like(d_best)
    shares[...] = jnp.zeros_like(shares)
    steps = inputs.queries.shape[1] // STEP_KEYS

    def process_step(step: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Writes the weights and gradients of this step's 256 queries to `shares` and
        `d_queries_exact`. Adds the contribution of the 256 queries before them, whose weights and
        gradients the previous step wrote to `shares`, to `d_best` and `sums`.

        Args:
          step: the index of this step.
          sums: two arrays with sums for each cluster: the gradients of the outputs of its queries
            [E, C], and the gradient of its mass [16, C]. The 16 rows are equal; a register of
            bfloat16 numbers has as many.

        Returns:
          `sums` plus the contribution.
        """
        place = pl.ds(jnp.maximum(step - 1, 0) * STEP_KEYS, STEP_KEYS)
        d_logits, weights, along = shares[0], shares[1], shares[2, :SUBLANES]
        for j in range(STEP_KEYS // LANES):
            tile = QueryTile(
                inputs, inputs.results, jnp.minimum(step, steps - 1) * (STEP_KEYS // LANES) + j
            )
            lanes = slice(j * LANES, (j + 1) * LANES)
            _backward_of_tile(tile, inputs, d_queries_exact, rows, shares.at[:, :, lanes], settings)
        members, gradient = membership(inputs, place), inputs.gradient[:, place]
        members = jnp.where(step > 0, members, 0)
        queries, wide = (x.astype(jnp.float32) for x in (inputs.queries[:, place], gradient))
        for first in range(0, settings.top_k, KEYS_AT_ONCE):
            parts, ranks = [], range(first, min(first + KEYS_AT_ONCE, settings.top_k))
            for r in ranks:
                parts += [queries * d_logits[r : r + 1], wide * weights[r : r + 1]]
            best_part = dot_float32(jnp.concatenate(parts, axis=0).astype(dtype), members, NT)
            for r in ranks:
                d_best[r] += best_part[(r - first) * both : (r - first + 1) * both]
        along = jnp.concatenate([along, along], axis=0).astype(dtype)
        member_sums = (dot_float32(x, members, NT) for x in (gradient, along))
        return sums[0] + next(member_sums), sums[1] + next(member_sums)

    width = inputs.values.shape[0]
    rest_part, along_part = (jnp.zeros((n, CLUSTERS), jnp.float32) for n in (width, 16))
    d_rest, along = jax.lax.fori_loop(0, steps + 1, process_step, (rest_part, along_part))
    return d_rest, jnp.zeros_like(along[:1]) if settings.mass_stop_gradient else along[:1]


def _backward_of_tile(
    tile: QueryTile,
    inputs: ImprovedKernelInputs,
    d_queries_exact: Any,
    rows: Any,
    shares: Any,
    settings: ImprovedKernelSettings,
) -> None:
    """Writes, for a tile of queries, the gradients of the logits of best keys, the weights of these
    keys, and the gradient of the cluster's mass from each query to `shares`.
    """
    gradient = inputs.gradient[:, tile.place].astype(jnp.float32)
    for r in range(settings.top_k):
        rows[0, partial_sum_rows(r)] = tile.partial_dot_products(tile.queries, tile.keys(r))
        rows[1, partial_sum_rows(r)] = tile.partial_dot_products(gradient, tile.values(r))
    weights, read = tile.weights(add_partial_sums(rows.at[0])), add_partial_sums(rows.at[1])
    along = jnp.sum(weights * read, axis=0, keepdims=True)
    weights *= tile.statistics.mass
    d_logits = weights * (read - along)
    shares[0, : settings.top_k], shares[1, : settings.top_k] = d_logits, weights
    shares[2, :SUBLANES] = jnp.broadcast_to(along, (SUBLANES, LANES))
    d_queries_exact[:, tile.place] = sum(
        d_logits[r : r + 1] * tile.keys(r) for r in range(settings.top_k)
    )


def _scatter_to_keys(
    places: Any,
    d_best: Any,
    d_best_transposed: Any,
    d_tokens: Any,
    settings: ImprovedKernelSettings,
) -> None:
    """Adds the gradients of best keys and their values to the rows of `d_tokens`, cluster by
    cluster.

    The best keys of a cluster are different keys, so their rows are distinct.
    """
    d_tokens[...] = jnp.zeros_like(d_tokens)

    def transpose_rank(r: Any, _: None) -> None:
        """Writes the transposed gradients of the r-th of each cluster's best keys and of its value
        to `d_best_transposed`, so that a cluster has a row instead of a column.
        """
        d_best_transposed[r] = d_best[r].T

    unrolled_loop(settings.top_k, transpose_rank)

    def add_cluster(cluster: Any, _: None) -> None:
        """Adds the gradients of a cluster's best keys and values to the rows of `d_tokens` that
        belong to these keys.
        """
        sums = []
        for r in range(settings.top_k):
            place = pl.ds(places[r, cluster], 1)
            sums.append((place, d_tokens[place] + d_best_transposed[r, pl.ds(cluster, 1)]))
        for place, row in sums:
            d_tokens[place] = row

    jax.lax.fori_loop(0, settings.used, add_cluster, None)


def _unpack_bits(bits: Any, step: Any) -> Bool[Array, "128 C"]:
    """Returns the bits of the 128 keys of tile number `step` as a mask, True for best keys.

    One register of words has the bits of 256 keys.
    """
    words = bits[pl.ds((step >> 1) * SUBLANES, SUBLANES)]
    first = (step & 1) * (LANES // SUBLANES)
    results = [words >> first + j & 1 for j in range(LANES // SUBLANES)]
    return jnp.concatenate(results, axis=0) > 0
