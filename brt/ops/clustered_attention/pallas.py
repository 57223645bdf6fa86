"""Clustered and improved clustered attention, with a Pallas kernel for the attention of centroids.

The centroids of the clusters attend to the keys like queries, so the kernels of masked attention
compute their attention, forward and backward (`brt.ops.masked_attention`). Their weights [C, X]
never leave the chip. Sums over clusters, the search for the best keys, and in improved clustered
attention the attention of the queries to the best keys, stay in plain XLA.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.attention import gpu
from brt.ops.clustered_attention import xla
from brt.ops.clustered_attention.config import ClusteredConfig
from brt.ops.dispatch import Implementation
from brt.ops.masked_attention import pallas_gpu, pallas_tpu
from brt.ops.partial_attention import AttentionPart
from brt.ops.tpu import LANES, head_refusal

_TILE = 128  # Centroids and keys are padded to a multiple of this number.
_KINDS = {"clustered": xla.clustered, "improved_clustered": xla.improved_clustered}
_MASKED = {"tpu": pallas_tpu.attend_part, "gpu": pallas_gpu.attend_part}


def implementations(kind: str) -> list[Implementation]:
    """Returns the kernels of a kind of clustered attention, a value of `Attention.kind`."""

    def kernel(backend: str) -> Implementation:
        function = functools.partial(attend_by_head, kind, backend)
        check = functools.partial(refusal, backend)
        return Implementation(f"pallas_{backend}", function, (backend,), (backend,), check)

    interpreted = functools.partial(attend_by_head, kind, "tpu", interpret=True)
    return [
        kernel("tpu"), kernel("gpu"),
        Implementation("pallas_interpret", interpreted, (), refusal=feature_refusal),
    ]  # fmt: skip


def feature_refusal(*inputs: Any, dropout: Any, bias: Any) -> str | None:
    """Returns why no kernel supports these settings, or None; interpreters take all sizes."""
    config: ClusteredConfig = inputs[-1]
    if config.kind == "improved_clustered" and config.mass_rule == "lse_jensen":
        return "does not have Attention.mass_rule = 'lse_jensen'"
    if bias is not None:
        return "has no bias of distances"
    return dispatch.dropout_refusal(dropout=dropout)


def refusal(
    backend: str, queries: Array, keys: Array, values: Array, valid: Any, labels: Any,
    config: ClusteredConfig, dropout: Any, bias: Any,
) -> str | None:  # fmt: skip
    """Returns the reason why a backend's kernel does not support these inputs, or None."""
    if reason := feature_refusal(config, dropout=dropout, bias=bias):
        return reason
    if keys.shape[3] != values.shape[3]:
        return f"has keys and values of one size, not of {keys.shape[3]} and {values.shape[3]}"
    if backend == "tpu":
        return head_refusal(keys.shape[3], queries.dtype)
    return gpu.refusal(queries, _TILE, _TILE)


def attend_by_head(
    kind: str, backend: str, queries: Float[Array, "B H T K"], keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"], valid: Bool[Array, "B X"], labels: Int[Array, "B H T"],
    config: ClusteredConfig, dropout: None, bias: None,
    **options: Any,
) -> Float[Array, "B H T E"]:  # fmt: skip
    attend = functools.partial(_attend, backend=backend, **options)
    local: Callable[..., Array] = functools.partial(
        _KINDS[kind], config=config, dropout=None, bias=None, attend=attend
    )
    if rules.partitioned():
        by_head = rules.partition_spec("lanes", "heads", None, None, shape=queries.shape)
        by_row = rules.partition_spec("lanes", None, shape=valid.shape)
        local = jax.shard_map(
            local, in_specs=(by_head, by_head, by_head, by_row, jax.P(*by_head[:3])),
            out_specs=by_head, axis_names=rules.automatic_axes(), check_vma=False,
        )  # fmt: skip
    return local(queries, keys, values, valid, labels)


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
    """Returns the attention of the centroids; see `xla.CentroidAttention`.

    `options` may have `interpret`, an argument of the kernels.
    """
    batch, heads, clusters, width = centroids.shape
    # Centroids have a mask for each head, and the kernels one for each row of the batch, so heads
    # become rows.
    by_head = jnp.broadcast_to(seen, (batch, heads, *seen.shape[2:]))
    mask = _padded(by_head, 3) if seen.shape[2] == 1 else _padded(_padded(by_head, 3), 2)
    # The TPU's kernels read heads of 64 in pairs, and a row has one head here.
    spare = -width % LANES if backend == "tpu" else 0
    q, k, v = (
        _padded(jnp.pad(x, ((0, 0),) * 3 + ((0, spare),)), 2)
        .reshape(batch * heads, -1, 1, width + spare)
        for x in (centroids, keys, values)
    )  # fmt: skip
    by_row = mask.reshape(batch * heads, *mask.shape[2:])
    part = _MASKED[backend](q, k, v, None, by_row, **options)
    return AttentionPart(
        part.output.reshape(batch, heads, -1, width + spare)[:, :, :clusters, :width],
        part.lse.reshape(batch, heads, -1)[:, :, :clusters],
    )


def _padded(x: Array, axis: int) -> Array:
    """Returns x, padded with zeros or False along an axis to a multiple of 128."""
    return jnp.pad(x, [(0, -x.shape[i] % _TILE if i == axis else 0) for i in range(x.ndim)])
