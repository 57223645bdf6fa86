"""Masked attention by the attention kernels for TPUs; keys are slabs (`brt.ops.attention.tpu`)."""

import functools
import math
from typing import Any

from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops import dropout_hash
from brt.ops.attention import tpu
from brt.ops.dropout import Dropout
from brt.ops.masked_attention.sharding import attend_on_devices, dropout_refusal
from brt.ops.partial_attention import AttentionPart


def refusal(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    dropout: Any = None,
) -> str | None:  # fmt: skip
    own_masks = mask.shape[-2] > 1
    shared = rules.shard_count("heads", queries.shape[-2])
    heads = tuple(x[..., : x.shape[-2] // shared, :] for x in (queries, keys))
    return dropout_refusal(queries, dropout) or tpu.slab_refusal(
        *heads, biased=bias is not None, own_masks=own_masks
    )


def attend_part(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H Q S"] | None,
    mask: Bool[Array, "*#B #Q S"],
    dropout: Dropout | None = None,
    *,
    interpret: tpu.Interpret = False,
) -> AttentionPart:
    """Implements `api.attend` and `api.attend_part`.

    Dropout has the numbers that `xla.attend_part` draws on TPUs. `interpret` runs the kernels on
    any device and with any sizes, slowly.
    """
    local = functools.partial(_local, interpret=interpret)
    return attend_on_devices(local, queries, keys, values, bias, mask, dropout)


interpreted = functools.partial(attend_part, interpret=True)


def _local(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    keys_of_queries: Array | None, *, interpret: tpu.Interpret, rate: float,
) -> tuple[Array, Array]:  # fmt: skip
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (queries, keys, values))
    words = None
    if keys_of_queries is not None:
        weights = queries.shape[-2] * keys.shape[-3]
        words = dropout_hash.draw_words(keys_of_queries, math.prod(queries.shape[:-3]), weights)
    part = tpu.attend_to_slab(
        q, k, v, bias, mask.reshape(-1, *mask.shape[-2:]), words, rate=rate, interpret=interpret
    )
    return part.output.reshape(queries.shape), part.lse.reshape(queries.shape[:-1])
