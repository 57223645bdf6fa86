"""Clustered and improved clustered attention (Vyas et al. 2020, sections 3.2 and 3.3).

The queries of a head are clustered by k-means of their hash codes. All queries of a cluster get the
attention output of its centroid. In improved clustered attention, each query computes its own
logits for the best keys of its cluster, the keys with the centroid's largest logits. Neither kind
is causal, because the clusters and best keys depend on the complete sequence.

In shapes, X is the number of keys, and C the number of clusters. K is the size of a key, and E the
size of a value. A distance is the position of a key minus the position of a query. There are
O = T + X - 1 distances, from 1 - T to X - 1.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.clustered_attention import pallas, reference, xla
from brt.ops.clustered_attention.clustering import cluster_queries
from brt.ops.clustered_attention.config import ClusteredConfig, ClusterInputs
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout

_INTERPRETED = partial(pallas.attend, backend="tpu", interpret=True)
OP = Op(
    "clustered_attention",
    (
        Implementation(
            "pallas_tpu", partial(pallas.attend, backend="tpu"), partial(pallas.refusal, "tpu")
        ),
        Implementation(
            "pallas_gpu", partial(pallas.attend, backend="gpu"), partial(pallas.refusal, "gpu")
        ),
        Implementation("pallas_interpret", _INTERPRETED, pallas.feature_refusal),
        Implementation("xla", xla.attend),
        Implementation("reference", reference.attend, dispatch.dropout_refusal),
    ),
)
_KINDS = "clustered", "improved_clustered"  # the values of `Attention.kind` that this op computes


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H E"],
    valid: Bool[Array, "B T"],
    config: ClusteredConfig,
    key: jax.Array,
    dropout: Dropout | None = None,
    *,
    scale: float,
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
      config: if its numbers of clusters or best keys exceed T, T takes their place.
      dropout: applied to the centroids' weights [B, H, C, T], which the members of a cluster share,
        and to each query's own weights of the best keys.
      bias: a relative position bias for each distance.
    """
    labels = cluster_queries(
        queries.swapaxes(1, 2), valid, config, key, implementation=kmeans_implementation
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

    `labels` has each query's cluster, one of C = min(`config.clusters`, T), and C for padding.
    """
    if config.kind not in _KINDS:
        raise NotImplementedError(
            f"Attention.kind = {config.kind!r} is no clustered attention; those are {list(_KINDS)}"
        )
    there = (labels[:, 0] < config.cluster_count(labels))[..., None, None]
    q = jnp.where(there, queries * scale, 0)
    k, v = (jnp.where(valid[..., None, None], x, 0) for x in (keys, values))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    inputs = ClusterInputs(q, k, v, valid, labels, bias)
    return dispatch.run(OP, implementation, inputs, config, dropout=dropout).swapaxes(1, 2)
