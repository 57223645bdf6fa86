"""Runs a kernel of causal clustered attention on each device, for the device's rows and heads.

In shapes, B is the number of rows of the batch, T of tokens of a segment, N of its blocks of W
tokens, H of heads, and K of numbers of a head; Z = T + W counts the cached block, too.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops.causal_clustered_attention.centroid_memory import CentroidMemory, Centroids
from brt.ops.partial_attention import AttentionPart


def refusal() -> str | None:
    """Returns the reason why the kernels do not support the current mesh, or None if they do."""
    if rules.is_sharded("blocks"):
        return "reads segments that each device has as a whole; set Mesh.sequence to 1"
    return None


def attend_on_devices(
    kernel: Callable[..., Float[Array, "B T H K"]],
    queries: Float[Array, "B T H K"],
    window: AttentionPart,
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    pasts: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every token over all earlier tokens, in the dtype of
    `values`.

    Args:
      kernel: computes the output of one device from the device's parts of the arguments below.
      queries, window, keys, values, cache_mask, pasts, centroids, bias: the arguments of
        `causal_clustered_attention`.
    """
    arguments = queries, window, keys, values, cache_mask, pasts, centroids, bias
    if not rules.partitioned():
        return kernel(*arguments)
    by_token = rules.partition_spec("lanes", None, "heads", None, shape=queries.shape)
    lanes, heads = by_token[0], by_token[2]
    memory, by_head = P(None, lanes, heads), P(heads)
    return jax.shard_map(
        kernel,
        in_specs=(
            by_token, AttentionPart(by_token, P(lanes, None, heads)), by_token, by_token, P(lanes),
            CentroidMemory(memory, memory, memory, memory, P(None, lanes)),
            Centroids(by_head, by_head), by_head,
        ),
        out_specs=by_token,
        axis_names=rules.automatic_axes(),
        check_vma=False,
    )(*arguments)  # fmt: skip
