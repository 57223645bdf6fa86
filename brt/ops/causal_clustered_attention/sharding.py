"""Runs a kernel of causal clustered attention on each device, for the device's rows and heads."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from brt.distributed import rules
from brt.ops.causal_clustered_attention.centroid_memory import CentroidMemory, Centroids
from brt.ops.partial_attention import AttentionPart


def refusal() -> str | None:
    """Returns the reason why the kernels do not support the current mesh, or None if they do."""
    if rules.is_sharded("blocks"):
        return "reads segments that each device has as a whole; set Mesh.sequence to 1"
    return None


def on_devices(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a version of `kernel` in which each device computes its own rows and heads."""

    @functools.wraps(kernel)
    def attend_on_devices(*arguments: Any, **options: Any) -> Array:
        local = functools.partial(kernel, **options)
        if not rules.partitioned():
            return local(*arguments)
        queries = arguments[0]
        by_token = rules.partition_spec("lanes", None, "heads", None, shape=queries.shape)
        lanes, heads = by_token[0], by_token[2]
        memory, by_head = P(None, lanes, heads), P(heads)
        return jax.shard_map(
            local,
            in_specs=(
                by_token, AttentionPart(by_token, P(lanes, None, heads)), by_token, by_token,
                P(lanes), CentroidMemory(memory, memory, memory, memory, P(None, lanes)),
                Centroids(by_head, by_head), by_head,
            ),
            out_specs=by_token,
            axis_names=rules.automatic_axes(),
            check_vma=False,
        )(*arguments)  # fmt: skip

    return attend_on_devices
