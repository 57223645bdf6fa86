"""Clustered and improved clustered attention (sections 3.2 and 3.3 of the paper).

Not causal: which queries share a cluster, and which keys count as its best, depends on the
whole sequence, so a causal mask could not make it so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Attention
from brt.ops import dispatch
from brt.ops.clustered_attention import clustered_tpu, improved_tpu, reference, xla
from brt.ops.clustered_attention.clustering import cluster_queries
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout


def _op(
    xla: Callable[..., Array],
    reference: Callable[..., Array],
    kernels: Sequence[Implementation],
) -> Op:
    naive = Implementation("reference", reference, auto=(), refusal=dispatch.dropout_refusal)
    return Op("clustered_attention", (*kernels, Implementation("xla", xla), naive))


def _kernels(module: Any, function: Callable[..., Array]) -> list[Implementation]:
    return [
        Implementation("pallas_tpu", function, ("tpu",), ("tpu",), module.refuses),
        Implementation("pallas_interpret", module.interpreted, (), refusal=module.has_no_such),
    ]


OPS = {
    "clustered": _op(
        xla.clustered, reference.clustered, _kernels(clustered_tpu, clustered_tpu.clustered)
    ),
    "improved_clustered": _op(
        xla.improved_clustered,
        reference.improved_clustered,
        _kernels(improved_tpu, improved_tpu.improved_clustered),
    ),
}  # by `Attention.kind`


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H E"],
    valid: Bool[Array, "B X"],
    config: Attention,
    key: jax.Array,
    dropout: Dropout | None = None,
    *,
    scale: float,
    queries_valid: Bool[Array, "B T"] | None = None,
    bias: Float[Array, "H O"] | None = None,
    implementation: str | None = None,
    kmeans_implementation: str | None = None,
) -> Float[Array, "B T H E"]:
    """Attention of clusters of queries; logits are scale * q.k.

    The same key gives the same result, bit by bit; evaluate with one fixed key.

    Args:
      valid: False on padding, which nothing sees and which changes nothing.
      config: its `kind` is "clustered" or "improved_clustered". In a short batch or row there
        are as many clusters as queries at most, and as many best keys as keys; numbers that no
        sequence reaches are refused with the configuration (`Attention.check_length`).
      key: of the random planes and of the queries that k-means starts from.
      dropout: of the weights [B, H, C, X] of clusters, and of those of queries for their
        cluster's best keys; all members of a cluster share the first.
      queries_valid: None: that of the keys, which belong to the same tokens (T = X).
      bias: float32, of each distance (key minus query) from 1 - T to X - 1, added to the logits;
        see `clustered_attention.relative`. None: none.
      implementation: a named one runs or raises; None takes the best that can.
      kmeans_implementation: the same, of what finds the clusters.

    Returns:
      In the dtype of `values`; softmax in float32. Zeros for padding, and for a query whose
      example has no key.

    Raises:
      NotImplementedError: a kind or an implementation that does not exist, or that refuses
        these inputs.
      ValueError: `queries_valid` is missing where keys and queries differ in number.
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
    config: Attention,
    dropout: Dropout | None = None,
    *,
    scale: float,
    bias: Float[Array, "H O"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H E"]:
    """`attend` for known clusters.

    Args:
      labels: int32, from 0 on; min(`config.clusters`, T) stands for padding.
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
