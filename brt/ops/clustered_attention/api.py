"""Clustered and improved clustered attention (sections 3.2 and 3.3 of the paper).

Clustered attention gives all queries of a cluster the attention output of the cluster's centroid.
In improved clustered attention, each query also computes its own logits for the best keys of its
cluster, which are the keys with the centroid's largest logits.

Neither kind is causal. The clusters of the queries and the best keys of a cluster depend on the
complete sequence, so a causal mask could not hide later tokens.

In shapes, B is the number of rows of the batch, H of heads, T of queries, X of keys, and C of
clusters; K and E are the sizes of a key and of a value of a head, and O = T + X - 1 is the number
of distances between a query and a key.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.clustered_attention import pallas, reference, xla
from brt.ops.clustered_attention.clustering import cluster_queries
from brt.ops.clustered_attention.config import ClusteredConfig
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout


def _clustered_op(kind: str, xla: Callable[..., Array], reference: Callable[..., Array]) -> Op:
    naive = Implementation("reference", reference, auto=(), refusal=dispatch.dropout_refusal)
    kernels = pallas.implementations(kind)
    return Op("clustered_attention", (*kernels, Implementation("xla", xla), naive))


# The keys of this dictionary are values of the setting `Attention.kind`.
OPS = {
    "clustered": _clustered_op("clustered", xla.clustered, reference.clustered),
    "improved_clustered": _clustered_op(
        "improved_clustered", xla.improved_clustered, reference.improved_clustered
    ),
}


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H E"],
    valid: Bool[Array, "B X"],
    config: ClusteredConfig,
    key: jax.Array,
    dropout: Dropout | None = None,
    *,
    scale: float,
    queries_valid: Bool[Array, "B T"] | None = None,
    bias: Float[Array, "H O"] | None = None,
    implementation: str | None = None,
    kmeans_implementation: str | None = None,
) -> Float[Array, "B T H E"]:
    """Clusters the queries, and returns their clustered or improved clustered attention output.

    The same random key gives bitwise the same result, so evaluation uses one fixed key.

    Args:
      queries: unscaled queries.
      keys: the keys.
      values: the values.
      valid: False for padding, which no query sees and which does not affect the result.
      config: settings whose `kind` is "clustered" or "improved_clustered". If T is smaller than
        `config.clusters`, there are T clusters; if X is smaller than `config.top_k`, there are X
        best keys.
      key: the random key of the planes that hash queries and of the queries that k-means starts
        from.
      dropout: dropout of the attention weights: of the centroids' weights [B, H, C, X], which all
        members of a cluster share, and of each query's own weights of its cluster's best keys.
      scale: factor of the logits q.k.
      queries_valid: False for queries that are padding; None stands for `valid`, if queries and
        keys belong to the same tokens (T = X).
      bias: float32, a relative position bias: for each head, the number to add to the logit of a
        key at each distance (key minus query) from 1 - T to X - 1. None stands for no bias.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.
      kmeans_implementation: the name of an implementation of k-means; None selects the best one
        that supports the inputs.

    Returns:
      The outputs in the dtype of `values`, with the softmax in float32. Padding, and queries of an
        example without keys, get zeros.

    Raises:
      NotImplementedError: the kind or the implementation does not exist, or it refuses these
        inputs.
      ValueError: `queries_valid` is missing although the numbers of keys and queries differ.
    """
    if queries_valid is None:
        if queries.shape[1] != valid.shape[1]:
            raise ValueError(
                f"{queries.shape[1]} queries of {valid.shape[1]} keys need queries_valid"
            )
        queries_valid = valid
    labels = cluster_queries(
        queries.swapaxes(1, 2), queries_valid, config, key, implementation=kmeans_implementation
    )
    return attend_by_label(
        queries, keys, values, valid, labels, config, dropout,
        scale=scale, bias=bias, implementation=implementation,
    )  # fmt: skip


def attend_by_label(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
    config: ClusteredConfig,
    dropout: Dropout | None = None,
    *,
    scale: float,
    bias: Float[Array, "H O"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H E"]:
    """Returns the clustered or improved clustered attention output for clusters that are already
    known.

    Args:
      queries, keys, values, valid, dropout, scale, bias, implementation: as for `attend`.
      labels: int32, the index of each query's cluster. There are C = min(`config.clusters`, T)
        clusters, and padding has the label C.
      config: the kind of clustered attention and its settings.
    """
    if config.kind not in OPS:
        raise NotImplementedError(
            f"Attention.kind = {config.kind!r} is no clustered attention; those are {list(OPS)}"
        )
    there = (labels[:, 0] < min(config.clusters, labels.shape[-1]))[..., None, None]
    q = jnp.where(there, queries * scale, 0)
    k, v = (jnp.where(valid[..., None, None], x, 0) for x in (keys, values))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    y = dispatch.run(
        OPS[config.kind], implementation, q, k, v, valid, labels, config, bias=bias, dropout=dropout
    )
    return y.swapaxes(1, 2)
