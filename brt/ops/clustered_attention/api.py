"""Clustered and improved clustered attention (Vyas et al. 2020, sections 3.2 and 3.3).

The queries of a head are clustered by k-means of their hash codes. All queries of a cluster get the
attention output of its centroid. In improved clustered attention, each query computes its own
logits for the best keys of its cluster, the keys with the centroid's largest logits. Neither kind
is causal, because the clusters and best keys depend on the complete sequence.

In shapes, X is the number of keys, C of clusters; K and E are the sizes of a key and of a value,
and O = T + X - 1 is the number of distances (key minus query) from 1 - T to X - 1.
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

    The same random `key` gives bitwise the same result, so evaluation uses one fixed key. Padding,
    and queries of an example without keys, get zeros.

    Args:
      queries: not yet multiplied by `scale`, the factor of the logits.
      valid: False for padding, which no query sees and which does not affect the result.
      config: there are at most T clusters and at most X best keys.
      dropout: of the centroids' weights [B, H, C, X], which the members of a cluster share, and of
        each query's own weights of the best keys.
      queries_valid: None stands for `valid`, if queries and keys belong to the same tokens.
      bias: a relative position bias for each distance.
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
    """Returns the output of `attend` for known clusters.

    There are C = min(`config.clusters`, T) clusters. The label of padding is C.
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
