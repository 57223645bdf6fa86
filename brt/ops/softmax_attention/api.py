"""Softmax attention to all keys: selection of the implementation, and sharding over devices.

Each device computes the attention of its own rows of the batch, blocks and heads.

In shapes, B is the number of rows of the batch, T and Q of queries of a row, N of blocks of S keys,
H of heads and K of numbers of a head.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops import dispatch, layout
from brt.ops.dispatch import Implementation, Op
from brt.ops.normalization import scaled_unit
from brt.ops.softmax_attention import pallas_gpu, pallas_tpu, reference, xla, xla_cpu


def _by_head_and_block(
    function: Callable[..., Any], swapaxes_copy: Callable[[Array, int, int], Array] = jnp.swapaxes
) -> Callable[..., Any]:
    """Wraps an implementation that expects heads before tokens in queries, too, and an axis for the
    blocks, if any.

    The wrapper also normalizes queries if a scale is passed.

    Args:
      function: the implementation.
      swapaxes_copy: the function that exchanges the axes of heads and tokens of the queries and of
        the output.
    """

    def attend_by_token(
        queries: Array, k: Array, *others: Any, scale: Array | None, **options: bool
    ) -> Array:
        """Calls `function`, for which the axis of heads of the queries must come before the axis of
        tokens, as in the keys. Here, the queries and the output have tokens before heads.

        Args:
          queries: [B, T, H, K].
          k: the keys, [B, *N, H, S, K]. If there is an axis of N blocks, the T queries of a row
            are split into N blocks of T / N queries, and each attends to its own block of keys.
          others: the values with the shape of k, followed by the other arguments of `function`.
          scale: the norm to which the queries of each head are first scaled; None for queries that
            are not normalized.
          options: passed to `function`.

        Returns:
          The attention output [B, T, H, K].
        """
        if scale is not None:
            queries = scaled_unit(queries, scale)
        blocked = (len(queries), *k.shape[1:-3], -1, *queries.shape[2:])
        q = swapaxes_copy(queries.reshape(blocked), -3, -2)
        return swapaxes_copy(function(q, k, *others, **options), -3, -2).reshape(queries.shape)

    return attend_by_token


OP = Op(
    "softmax_attention",
    (
        Implementation("pallas_tpu", pallas_tpu.attention, ("tpu",), ("tpu",), pallas_tpu.refusal),
        Implementation("pallas_gpu", pallas_gpu.attention, ("gpu",), ("gpu",), pallas_gpu.refusal),
        Implementation(
            "xla_cpu", _by_head_and_block(xla_cpu.attention, layout.swapaxes_copy), auto=("cpu",)
        ),
        Implementation("xla", _by_head_and_block(xla.attention)),
        Implementation("pallas_interpret", pallas_tpu.interpreted, auto=()),
        Implementation("pallas_gpu_interpret", pallas_gpu.interpreted, auto=()),
        Implementation("reference", _by_head_and_block(reference.attention), auto=()),
    ),
)


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B *N S H K"],
    values: Float[Array, "B *N S H K"],
    *,
    scale: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every query over all keys, in the dtype of `values`.

    The logits are q.k. If the keys have an axis of N blocks, the T queries of a row are split into
    N blocks as well, and each block of queries attends to its own block of keys.

    Args:
      queries: the queries. If `scale` is None, the caller has already multiplied them by the factor
        of the logits.
      keys: the keys.
      values: the values.
      scale: the norm to which the queries of each head are first scaled; None for queries that are
        not normalized.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    k, v = (x.swapaxes(-3, -2) for x in (keys, values))
    return _attend(queries, k, v, None, scale, False, implementation)


def attend_to_blocks(
    queries: Float[Array, "B Q H K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X K"],
    cache_mask: Bool[Array, " B"],
    *,
    null_keys: bool,
    implementation: str | None = None,
) -> Float[Array, "B Q H K"]:
    """Returns the attention output of every query over the X keys of two blocks of X / 2 tokens, in
    the dtype of `values`.

    Args:
      queries: already multiplied by any scale.
      keys, values: keys and values of both blocks, the previous block first; the axis of heads
        comes before the axis of tokens.
      cache_mask: True if the queries of a row may read the previous block.
      null_keys: True makes keys that `cache_mask` hides count as zero keys with zero values. False
        excludes these keys from the softmax.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.
    """
    return _attend(queries, keys, values, cache_mask, None, null_keys, implementation)


def _attend(
    queries: Array, k: Array, v: Array, cache_mask: Array | None, scale: Array | None,
    null_keys: bool, implementation: str | None,
) -> Array:  # fmt: skip
    """Selects the implementation and runs it on each device for the device's part of the arrays."""

    def attend_on_device(queries: Array, k: Array, v: Array, cache_mask: Any, scale: Any) -> Array:
        """Returns the attention output of one device. The arguments are the device's parts of the
        arguments of `_attend` with the same names.
        """
        return dispatch.run(
            OP, implementation, queries, k, v, cache_mask, null_keys=null_keys, scale=scale
        )

    if not rules.partitioned():
        return attend_on_device(queries, k, v, cache_mask, scale)
    by_block = k.ndim > queries.ndim
    tokens, lanes = ("tokens", ("lanes", "blocks")) if by_block else (None, ("lanes",))
    q_partition = rules.partition_spec("lanes", tokens, "heads", None, shape=queries.shape)
    k_partition = rules.partition_spec(*lanes, "heads", None, None, shape=k.shape)
    lane_partition = rules.partition_spec("lanes", shape=queries.shape[:1])
    return jax.shard_map(
        attend_on_device,
        in_specs=(q_partition, k_partition, k_partition, lane_partition, P(q_partition[2])),
        out_specs=q_partition,
        axis_names=rules.automatic_axes(),
        check_vma=False,
    )(queries, k, v, cache_mask, scale)
