"""Masked attention by the GPU kernels of `brt.ops.attention`.

In shapes, T is the number of queries and S of keys.
"""

import functools
from typing import Any

from jaxtyping import Array, Bool, Float

from brt.ops import dropout_hash
from brt.ops.attention import gpu
from brt.ops.dropout import Dropout
from brt.ops.masked_attention.sharding import attend_on_devices, dropout_refusal
from brt.ops.partial_attention import AttentionPart

_WIDEST_WITH_BIAS = 128  # With wider heads, the kernel for the bias's gradient spills registers.


def refusal(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    dropout: Any = None,
) -> str | None:  # fmt: skip
    if bias is not None and queries.shape[-1] > _WIDEST_WITH_BIAS:
        return f"has a bias for heads of 64 or 128, not of {queries.shape[-1]}"
    return dropout_refusal(queries, dropout) or gpu.refusal(
        queries, queries.shape[-3], keys.shape[-3]
    )


def attend_part(
    queries: Float[Array, "*B T H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H T S"] | None,
    mask: Bool[Array, "*#B #T S"],
    dropout: Dropout | None = None,
    *,
    interpret: Any = None,
) -> AttentionPart:
    """Implements `api.attend` and `api.attend_part`.

    Dropout has the numbers that `xla.attend_part` draws on GPUs and TPUs. If `interpret` is not
    None, it is passed to Pallas, to run the kernels without a GPU.
    """
    local = functools.partial(_local, interpret=interpret)
    return attend_on_devices(local, queries, keys, values, bias, mask, dropout)


def _local(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    random_keys: Array | None, *, interpret: Any, rate: float,
) -> tuple[Array, Array]:  # fmt: skip
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (queries, keys, values))
    seen, draws = mask.reshape(-1, *mask.shape[-2:]), None
    if random_keys is not None:
        draws = dropout_hash.draw_words(random_keys, len(q), q.shape[2] * k.shape[1])
    part = gpu.attend(
        q, k, v, gpu.mask_spans(seen), whole_tiles=True, bias=bias, mask=seen,
        draws=draws, rate=rate, interpret=interpret,
    )  # fmt: skip
    return part.output.reshape(queries.shape), part.lse.reshape(queries.shape[:-1])
