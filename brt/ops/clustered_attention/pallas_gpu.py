"""Clustered and improved clustered attention on GPUs, with a kernel for the attention of centroids.

The centroids of the clusters attend to the keys like queries, so the Triton kernel of masked
attention computes their attention, forward and backward (`brt.ops.masked_attention`). Their weights
[C, X] never leave the chip. Sums over clusters, the search for the best keys, and in improved
clustered attention the attention of the queries to the best keys, stay in plain XLA.

In shapes, B is the number of rows of the batch, H of heads, T of queries, X of keys, and C of
clusters; K and E are the sizes of a key and of a value of a head.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.clustered_attention import shared_tpu, xla
from brt.ops.clustered_attention.config import ClusteredConfig
from brt.ops.gpu import triton_refusal
from brt.ops.head_limits import heads_refusal
from brt.ops.masked_attention import pallas_gpu as masked
from brt.ops.partial_attention import AttentionPart

_TILE = 128  # Centroids and keys are padded to a multiple of this number.


def feature_refusal(*arguments: Any, dropout: Any, bias: Any) -> str | None:
    """Returns the reason to refuse settings that the kernel does not support, or None.

    Pallas's interpreter needs only this check, because it runs the kernel with any sizes.
    """
    config = arguments[-1]
    if config.kind == "improved_clustered" and config.mass_rule == "lse_jensen":
        return "does not have Attention.mass_rule = 'lse_jensen'"
    return shared_tpu.feature_refusal(dropout=dropout, bias=bias)


def refusal(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Any,
    labels: Any,
    config: ClusteredConfig,
    dropout: Any,
    bias: Any,
) -> str | None:
    """Returns the reason why the kernel does not support these inputs, or None if it does.

    The arguments are the same as for `clustered` below; dropout and a bias are refused.
    """
    if reason := feature_refusal(config, dropout=dropout, bias=bias):
        return reason
    if keys.shape[3] != values.shape[3]:
        return f"has keys and values of one size, not of {keys.shape[3]} and {values.shape[3]}"
    return heads_refusal(queries, masked.HEAD_DIMS, masked.DTYPES) or triton_refusal()


def clustered(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
    config: ClusteredConfig,
    dropout: None,
    bias: None,
    *,
    interpret: bool = False,
) -> Float[Array, "B H T E"]:
    """Returns, for each query, the attention output of its cluster's centroid, in the dtype of
    `values`.

    Args:
      queries: queries, already multiplied by any scale.
      keys, values: the keys and the values.
      valid: False for padding, which no query sees.
      labels: the cluster of each query; the number of clusters for padding, which gets zeros.
      config: the settings of clustered attention.
      dropout, bias: None, because the kernel supports neither.
      interpret: True runs the kernel on any device, slowly, and with heads of any size.
    """
    return _by_head(xla.clustered, queries, keys, values, valid, labels, config, interpret)


def improved_clustered(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
    config: ClusteredConfig,
    dropout: None,
    bias: None,
    *,
    interpret: bool = False,
) -> Float[Array, "B H T E"]:
    """Returns the output of improved clustered attention, in the dtype of `values`.

    The arguments are those of `clustered`.
    """
    return _by_head(xla.improved_clustered, queries, keys, values, valid, labels, config, interpret)


clustered_interpreted = functools.partial(clustered, interpret=True)
improved_interpreted = functools.partial(improved_clustered, interpret=True)


def _by_head(
    attention: Callable[..., Array], queries: Array, keys: Array, values: Array, valid: Array,
    labels: Array, config: ClusteredConfig, interpret: bool,
) -> Float[Array, "B H T E"]:  # fmt: skip
    """Computes a kind of clustered attention on each device, for its own rows and heads."""
    attend = functools.partial(_attend, interpret=interpret)
    local = functools.partial(attention, config=config, dropout=None, bias=None, attend=attend)
    return shared_tpu.shard_by_head(local, queries, keys, values, valid, labels)


def _attend(
    centroids: Float[Array, "B H C K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    seen: Bool[Array, "B #H #C X"],
    logits: Any,
    dropout: None,
    *,
    interpret: bool,
) -> AttentionPart:
    """Returns the attention of the centroids; see `xla.CentroidAttention`.

    Centroids have a mask for each head. The kernel has a mask for each row of the batch, so heads
    become rows.
    """
    batch, heads, clusters, _ = centroids.shape
    by_head = jnp.broadcast_to(seen, (batch, heads, *seen.shape[2:]))
    mask = _padded(by_head, 3) if seen.shape[2] == 1 else _padded(_padded(by_head, 3), 2)
    q, k, v = (
        _padded(x, 2).reshape(batch * heads, -1, 1, x.shape[3]) for x in (centroids, keys, values)
    )
    by_row = mask.reshape(batch * heads, *mask.shape[2:])
    part = masked.attend_part(q, k, v, None, by_row, interpret=interpret)
    return AttentionPart(
        part.output.reshape(batch, heads, -1, values.shape[3])[:, :, :clusters],
        part.lse.reshape(batch, heads, -1)[:, :, :clusters],
    )


def _padded(x: Array, axis: int) -> Array:
    """Returns x, padded with zeros or False along an axis to a multiple of 128."""
    return jnp.pad(x, [(0, -x.shape[i] % _TILE if i == axis else 0) for i in range(x.ndim)])
