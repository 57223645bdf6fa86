"""Functions that the TPU kernels of clustered and improved clustered attention share.

In shapes, B is the number of rows of the batch, H of heads, T of queries, X of keys, C of clusters,
and N of tokens after padding; K and E are the sizes of a key and of a value of a head.
"""

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


def feature_refusal(*_: Any, dropout: Any, bias: Any) -> str | None:
    """Returns the reason to refuse dropout or a bias, which the kernels do not support, or None if
    both are None.

    Other inputs are ignored.
    """
    if bias is not None:
        return "has no bias of distances"
    return dispatch.dropout_refusal(dropout=dropout)


def head_refusal(queries: Float[Array, "B H T K"], values: Float[Array, "B H X E"]) -> str | None:
    """Returns the reason why the kernels do not support the head sizes of these queries and values
    or the dtype of the queries, or None if they do.
    """
    if queries.shape[3] not in _WIDTHS or values.shape[3] not in _WIDTHS:
        return f"has heads of 64 or 128, not of {queries.shape[3]} and {values.shape[3]}"
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {queries.dtype}"
    return None


def shard_by_head(
    local: Callable[..., Float[Array, "B H T E"]],
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
) -> Float[Array, "B H T E"]:
    """Returns local(queries, keys, values, valid, labels), computed by each device for its own rows
    of the batch and its own heads.

    Args:
      local: the function, which each device calls with its own shards of the other arguments.
      queries, keys, values: the arrays of the attention.
      valid: False for keys that are padding.
      labels: the cluster of each query.
    """
    if rules.partitioned():
        head_partition = rules.partition_spec("lanes", "heads", None, None, shape=queries.shape)
        lane_partition = rules.partition_spec("lanes", None, shape=valid.shape)
        local = jax.shard_map(
            local,
            in_specs=(
                head_partition,
                head_partition,
                head_partition,
                lane_partition,
                jax.P(*head_partition[:3]),
            ),
            out_specs=head_partition,
            axis_names=rules.automatic_axes(),
            check_vma=False,
        )
    return local(queries, keys, values, valid, labels)


def pad_tokens(
    x: Shaped[Array, "... T"], tile: int, fill: float | int = 0
) -> Shaped[Array, "... N"]:
    """Returns x with its last axis, the tokens, padded with the number `fill` to a multiple of
    `tile`.
    """
    spare = ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % tile),)
    return jnp.pad(x, spare, constant_values=fill)


def padded_labels(
    labels: Int[Array, "B H T"], used: int, tile: int, padding_label: int
) -> Int[Array, "B H 1 N"]:
    """Returns the cluster of each query, with the axis of queries padded to a multiple of `tile`.

    Args:
      labels: the cluster of each query. A label of at least `used` means that the query is padding.
      used: the number of clusters.
      tile: the number of queries of a tile.
      padding_label: the label of all padding in the result.
    """
    labels = jnp.where(labels < used, labels, padding_label)
    return pad_tokens(labels, tile, padding_label)[:, :, None]


def key_mask_bias(valid: Bool[Array, "B X"], tile: int) -> Float[Array, "B 1 N"]:
    """Returns the float32 term that hides padding when it is added to the logits: 0 for valid keys,
    and for padding MASKED, a large negative number.

    Args:
      valid: True for valid keys.
      tile: the number of keys of a tile; the keys are padded to a multiple of this number.
    """
    return pad_tokens(jnp.where(valid, 0.0, MASKED), tile, MASKED)[:, None]


def block_specs(arguments: Any) -> Any:
    """Returns the Pallas block spec of each input of a kernel whose grid has a step for each head
    of each lane (row of the batch).

    `arguments` is a NamedTuple of arrays whose first axes are lanes and heads; only the field
    `key_mask_bias` has no axis of heads. The result is a NamedTuple of the same type.
    """
    specs = jax.tree.map(lambda x: head_block_spec(*x.shape[2:]), arguments)
    lane_spec = pl.BlockSpec((None, 1, arguments.key_mask_bias.shape[2]), lambda h, b: (b, 0, 0))
    return specs._replace(key_mask_bias=lane_spec)


def call_options(
    name: str, x: Float[Array, "B H K T"], size: int, interpret: Any, **cost: int
) -> dict[str, Any]:
    """Returns keyword arguments of `pl.pallas_call`: the kernel's name, cost estimate and options.

    The name contains the kernel's sizes and the number of steps of its grid, from which
    `brt.planning.schedules` computes the cycles that the kernel takes.

    Args:
      name: the first part of the kernel's name.
      x: an input. The grid has a step for each of its B * H heads.
      size: a number that the name contains after the number of tokens, such as the number of
        clusters.
      interpret: the argument `interpret` of `pl.pallas_call`.
      **cost: the fields of `pl.CostEstimate`.
    """
    batch, heads, _, tokens = x.shape
    return {
        "name": f"{name}_{tokens}x{size}_{x.dtype}_{batch * heads}_steps",
        "interpret": interpret,
        "compiler_params": parallel_heads(2),
        "cost_estimate": pl.CostEstimate(**cost),
    }


def membership(labels: Any, place: Any, clusters: int) -> Float[Array, "C N"]:
    """Returns the membership matrix of clusters and queries in float32: 1 where a query belongs to
    a cluster, 0 elsewhere.

    Args:
      labels: [1, T], the cluster of each query.
      place: the slice of the N queries that the matrix is for.
      clusters: C, the number of clusters.
    """
    labels = labels[:, place]
    cluster = jax.lax.broadcasted_iota(jnp.int32, (clusters, labels.shape[1]), 0)
    return jnp.where(cluster == labels, 1.0, 0.0)
