"""Causal clustered attention with a Pallas kernel, without sorting queries by centroid.

The attention of a token to the keys before its window has three parts. The kernel computes the two
parts in which each query sees a span of consecutive keys: the keys of the previous block that have
left the window, and the keys that the query's centroid keeps. A query is multiplied with the keys
of all centroids, and all keys except those of the query's own centroid are masked. Nothing is
sorted or gathered, no logits are written to memory, and no gradient of a key is scattered. The
third part, the attention of the query's centroid to the remaining keys, is one vector for each
query, which plain XLA reads from the memory.

The module `api` says what the letters in shapes mean. S is the number of keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.attention import gpu, tpu
from brt.ops.causal_clustered_attention.centroid_memory import (
    CentroidMemory,
    Centroids,
    FarInputs,
    nearest_centroids,
)
from brt.ops.causal_clustered_attention.xla import join_blocks, previous_blocks, split_blocks
from brt.ops.clustered_attention.members import gather_by_label
from brt.ops.partial_attention import AttentionPart, merge_parts
from brt.ops.tpu import head_refusal

_ATTEND = {"tpu": tpu.attend_to_slab, "gpu": gpu.attend}


def refusal(backend: str, inputs: FarInputs, **_: Any) -> str | None:
    """Returns why the kernels do not support these inputs, or None if they do."""
    if rules.is_sharded("blocks"):
        return "reads segments that each device has as a whole; set Mesh.sequence to 1"
    queries, width = inputs.queries, inputs.queries.shape[1] // inputs.blocks
    clusters, slots = inputs.pasts.keys.shape[3:5]
    if backend == "gpu":
        return gpu.refusal(queries, width, clusters * slots)
    if width % 128 or (clusters * slots) % 128:
        return (
            f"takes windows of a multiple of 128 tokens, and centroids that keep a multiple of 128 "
            f"keys together, not {width} and {clusters} x {slots}"
        )
    return head_refusal(queries)


def attend(
    inputs: FarInputs, *, attend_to_self: bool, backend: str, interpret: Any = None
) -> Float[Array, "B T H K"]:
    """Implements `api.causal_clustered_attention`; each device computes its own rows and heads."""
    local = functools.partial(
        _attend, attend_to_self=attend_to_self, kernel=_ATTEND[backend], interpret=interpret
    )
    if not rules.partitioned():
        return local(inputs)
    by_token = rules.partition_spec("lanes", None, "heads", None, shape=inputs.queries.shape)
    lanes, heads = by_token[0], by_token[2]
    memory, by_head = P(None, lanes, heads), P(heads)
    specs = FarInputs(
        by_token, AttentionPart(by_token, P(lanes, None, heads)), by_token, by_token, P(lanes),
        CentroidMemory(memory, memory, memory, memory, P(None, lanes)),
        Centroids(by_head, by_head), by_head,
    )  # fmt: skip
    return dispatch.on_devices(local, (specs,), by_token)(inputs)


def _attend(
    inputs: FarInputs, *, attend_to_self: bool, kernel: Callable[..., AttentionPart], interpret: Any
) -> Float[Array, "B T H K"]:
    cache_mask, pasts, blocks = inputs.cache_mask, inputs.pasts, inputs.blocks
    q, slots = split_blocks(inputs.queries, blocks), pasts.keys.shape[4]
    width, by_query = q.shape[3], q.shape[:-1]
    attend = functools.partial(_attend_to_spans, kernel, interpret)

    passed_keys = jnp.arange(width) + (1 if attend_to_self else 0)
    end = jnp.where(cache_mask.T[:, :, None, None], passed_keys, 0)
    before = previous_blocks(inputs.keys, inputs.values, cache_mask)
    nearby = attend(q, *before, jnp.zeros(by_query, jnp.int32), jnp.broadcast_to(end, by_query))

    labels = nearest_centroids(q.reshape(-1, *q.shape[2:]), inputs.centroids).reshape(by_query)
    kept_keys, kept_values = (x.reshape(*x.shape[:3], -1, x.shape[-1]) for x in pasts[:2])
    first = labels * slots
    best = attend(q, kept_keys, kept_values, first, first + pasts.filled[:, :, None, None])

    far, bias = [nearby, best, _own_sums(pasts, labels)], inputs.bias[None, None, :, None]
    far = [AttentionPart(part.output, part.lse + bias) for part in far]
    own = AttentionPart(*(split_blocks(x, blocks) for x in inputs.window))
    return join_blocks(merge_parts([own, *far]).output.astype(inputs.values.dtype))


def _attend_to_spans(
    kernel: Callable[..., AttentionPart],
    interpret: Any,
    queries: Float[Array, "N B H W K"],
    keys: Float[Array, "N B H S K"],
    values: Float[Array, "N B H S K"],
    first: Int[Array, "N B H W"],
    end: Int[Array, "N B H W"],
) -> AttentionPart:
    """Returns the attention output of every query over the keys from `first` to `end` - 1."""
    q, k, v = (x.reshape(-1, x.shape[-2], 1, x.shape[-1]) for x in (queries, keys, values))
    spans = jnp.stack([first, end], axis=-2).astype(jnp.int32).reshape(len(q), 2, -1)
    part = kernel(q, k, v, spans=spans, interpret=interpret)
    return AttentionPart(part.output.reshape(queries.shape), part.lse.reshape(queries.shape[:-1]))


def _own_sums(pasts: CentroidMemory, labels: Int[Array, "N B H W"]) -> AttentionPart:
    """Returns, for each query, `rest` and `lse` of the query's centroid (see `CentroidMemory`)."""
    flat = labels.reshape(-1, *labels.shape[2:])

    def gather(x: Float[Array, "N B H C K"]) -> Float[Array, "N B H W K"]:
        found = gather_by_label(x.reshape(-1, *x.shape[2:]), flat)
        return found.reshape(*labels.shape, x.shape[-1])

    return AttentionPart(gather(pasts.rest), gather(pasts.lse[..., None])[..., 0])
