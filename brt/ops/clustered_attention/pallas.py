"""Clustered and improved clustered attention, with a Pallas kernel for the attention of centroids.

The centroids of the clusters attend to the keys like queries, so the kernels of
`brt.ops.masked_attention` compute the attention of the centroids, forward and backward. The weights
[C, X] of the centroids never leave the chip. Plain XLA computes all else: the sums over clusters
and, in improved clustered attention, the best keys and the queries' attention to them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.attention import gpu
from brt.ops.clustered_attention import xla
from brt.ops.clustered_attention.config import ClusteredConfig, ClusterInputs
from brt.ops.masked_attention import pallas
from brt.ops.partial_attention import AttentionPart
from brt.ops.tpu import LANES, head_refusal

_TILE = 128  # Centroids and keys are padded to a multiple of this number.


def feature_refusal(
    inputs: ClusterInputs, config: ClusteredConfig, *, dropout: Any = None
) -> str | None:
    """Returns why no kernel supports these settings, or None if one does.

    Sizes are not checked here, because interpreted kernels take all sizes.
    """
    if inputs.bias is not None:
        return "has no bias of distances"
    return dispatch.dropout_refusal(dropout=dropout)


def refusal(
    backend: str, inputs: ClusterInputs, config: ClusteredConfig, *, dropout: Any = None
) -> str | None:
    """Returns the reason why a backend's kernel does not support these inputs, or None."""
    if reason := feature_refusal(inputs, config, dropout=dropout):
        return reason
    of_keys, of_values = inputs.keys.shape[3], inputs.values.shape[3]
    if of_keys != of_values:
        return f"has keys and values of one size, not of {of_keys} and {of_values}"
    if backend == "tpu":
        return head_refusal(inputs.queries)
    return gpu.refusal(inputs.queries, _TILE, _TILE)


def attend(
    inputs: ClusterInputs, config: ClusteredConfig, *, dropout: None = None, backend: str,
    **options: Any,
) -> Float[Array, "B H T E"]:  # fmt: skip
    """Implements `api.attend_by_label`; each device computes its own rows and heads."""
    centroids = functools.partial(_attend, backend=backend, **options)

    def local(inputs: ClusterInputs) -> Float[Array, "B H T E"]:
        return xla.attend(inputs, config, dropout=None, attend=centroids)

    if rules.partitioned():
        by_head = rules.partition_spec("lanes", "heads", None, None, shape=inputs.queries.shape)
        by_row = rules.partition_spec("lanes", None, shape=inputs.valid.shape)
        specs = ClusterInputs(by_head, by_head, by_head, by_row, jax.P(*by_head[:3]))
        return dispatch.on_devices(local, (specs,), by_head)(inputs)
    return local(inputs)


def _attend(
    centroids: Float[Array, "B H C K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    seen: Bool[Array, "B #H #C X"],
    logits: Any,
    dropout: None,
    *,
    backend: str,
    **options: Any,
) -> AttentionPart:
    """Returns the attention of the centroids to the keys for which `seen` is True.

    The arguments are those of `xla.CentroidAttention`. `logits` are not used, because the kernels
    compute them. `options` may have `interpret`, an argument of the kernels.
    """
    batch, heads, clusters, width = centroids.shape
    # Centroids have a mask for each head, but the kernels take one mask for each row of the batch,
    # so heads become rows.
    by_head = jnp.broadcast_to(seen, (batch, heads, *seen.shape[2:]))
    mask = _padded(by_head, 3) if seen.shape[2] == 1 else _padded(_padded(by_head, 3), 2)
    # The TPU's kernels read heads of 64 in pairs. Here, a row has one head, which is padded.
    spare = -width % LANES if backend == "tpu" else 0
    q, k, v = (
        _padded(jnp.pad(x, ((0, 0),) * 3 + ((0, spare),)), 2)
        .reshape(batch * heads, -1, 1, width + spare)
        for x in (centroids, keys, values)
    )  # fmt: skip
    by_row = mask.reshape(batch * heads, *mask.shape[2:])
    part = pallas.attend_part(q, k, v, None, by_row, backend=backend, **options)
    return AttentionPart(
        part.output.reshape(batch, heads, -1, width + spare)[:, :, :clusters, :width],
        part.lse.reshape(batch, heads, -1)[:, :, :clusters],
    )


def _padded(x: Array, axis: int) -> Array:
    """Returns x, padded with zeros or False along an axis to a multiple of 128."""
    return jnp.pad(x, [(0, -x.shape[i] % _TILE if i == axis else 0) for i in range(x.ndim)])
