"""Attention on GPUs in which each query sees a span of consecutive keys, without a mask in memory.

The Triton kernels are those of masked attention. They compute which keys a query sees from the two
ends of the query's span: 8 bytes per query instead of one byte per query and key.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.masked_attention.pallas_gpu import (
    KernelArguments,
    KernelSettings,
    attend_on_device,
)
from brt.ops.partial_attention import AttentionPart


def attend_to_spans(
    queries: Float[Array, "*B Q K"],
    keys: Float[Array, "*B S K"],
    values: Float[Array, "*B S K"],
    first: Int[Array, "*B Q"],
    end: Int[Array, "*B Q"],
    *,
    interpret: bool = False,
) -> AttentionPart:
    """Returns the attention output of every query over its span of keys, in the queries' dtype.

    Query q sees the keys from first[q] to end[q] - 1, and gets zeros if there are none. The numbers
    of queries and of keys must be multiples of 128, and K 64 or 128. *B stands for all axes that
    queries, keys and values share, such as the rows of the batch and the heads. `interpret` runs
    the kernels on any device and with any sizes, slowly.
    """
    q, k, v = (x.reshape(-1, x.shape[-2], 1, x.shape[-1]) for x in (queries, keys, values))
    spans = jnp.stack([first, end], axis=-2).astype(jnp.int32)
    arguments = KernelArguments(q, k, v, None, None, spans.reshape(-1, *spans.shape[-2:]))
    y, lse = attend_on_device(arguments, KernelSettings(0.0, interpret))
    return AttentionPart(y.reshape(queries.shape), lse.reshape(queries.shape[:-1]))
