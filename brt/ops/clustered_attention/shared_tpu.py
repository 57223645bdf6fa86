"""What both kernels of clustered attention on TPUs share: see `clustered_tpu`, `improved_tpu`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Shaped

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.softmax import MASKED
from brt.ops.tpu import head_block_spec, parallel_heads

_WIDTHS = (64, 128)


def has_no_such(*_: Any, dropout: Any, bias: Any) -> str | None:
    """Of any size."""
    if bias is not None:
        return "has no bias of distances"
    return dispatch.dropout_refusal(dropout=dropout)


def refuses_heads(queries: Float[Array, "B H T K"], values: Float[Array, "B H X E"]) -> str | None:
    """Why the kernels do not take heads of such sizes and dtype; None: they do."""
    if queries.shape[3] not in _WIDTHS or values.shape[3] not in _WIDTHS:
        return f"has heads of 64 or 128, not of {queries.shape[3]} and {values.shape[3]}"
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {queries.dtype}"
    return None


def by_device(
    local: Callable[..., Float[Array, "B H T E"]],
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
) -> Float[Array, "B H T E"]:
    """`local` of all five, by each device of the lanes and heads that it has."""
    if rules.partitioned():
        by_head = rules.partition_spec("lanes", "heads", None, None, shape=queries.shape)
        of_lanes = rules.partition_spec("lanes", None, shape=valid.shape)
        local = jax.shard_map(
            local, in_specs=(by_head, by_head, by_head, of_lanes, jax.P(*by_head[:3])),
            out_specs=by_head, axis_names=rules.axes(), check_vma=False,
        )  # fmt: skip
    return local(queries, keys, values, valid, labels)


def filled(
    x: Shaped[Array, "... T"], tile: int, nothing: float | int = 0
) -> Shaped[Array, "... N"]:
    """Whole tiles of tokens."""
    spare = ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % tile),)
    return jnp.pad(x, spare, constant_values=nothing)


def labels_of(
    labels: Int[Array, "B H T"], used: int, tile: int, beyond: int
) -> Int[Array, "B H 1 N"]:
    """Labels of `used` clusters, and `beyond` of padding."""
    return filled(jnp.where(labels < used, labels, beyond), tile, beyond)[:, :, None]


def unseen_of(valid: Bool[Array, "B X"], tile: int) -> Float[Array, "B 1 N"]:
    """What is added to logits."""
    return filled(jnp.where(valid, 0.0, MASKED), tile, MASKED)[:, None]


def places(arguments: Any) -> Any:
    """Where a step finds its inputs, of which `unseen` has no heads."""
    at = jax.tree.map(lambda x: head_block_spec(*x.shape[2:]), arguments)
    of_lane = pl.BlockSpec((None, 1, arguments.unseen.shape[2]), lambda h, b: (b, 0, 0))
    return at._replace(unseen=of_lane)


def options(
    name: str, x: Float[Array, "B H K T"], size: int, interpret: Any, **cost: int
) -> dict[str, Any]:
    """The name is what `brt.planning.schedules` knows a kernel by, and how often its grid runs."""
    batch, heads, _, tokens = x.shape
    return {
        "name": f"{name}_{tokens}x{size}_{x.dtype}_{batch * heads}_steps",
        "interpret": interpret,
        "compiler_params": parallel_heads(2),
        "cost_estimate": pl.CostEstimate(**cost),
    }


def members_of(labels: Any, place: Any, clusters: int) -> Float[Array, "C N"]:
    """1 where a query is of a cluster."""
    own = labels[:, place]
    cluster = jax.lax.broadcasted_iota(jnp.int32, (clusters, own.shape[1]), 0)
    return jnp.where(cluster == own, 1.0, 0.0)
