"""Masked attention by the attention kernels of TPUs and GPUs (`brt.ops.attention`).

Each device computes its own rows and heads. Of the leading axes *B, only the first one is sharded.
In shapes, T is the number of queries, and S the number of keys.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops import dispatch, dropout_hash
from brt.ops.attention import gpu, tpu
from brt.ops.dropout import Dropout
from brt.ops.partial_attention import AttentionPart

# With wider heads than this, the GPU kernel for the bias's gradient spills registers.
_WIDEST_WITH_BIAS = 128


def refusal(
    backend: str, queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    dropout: Any = None,
) -> str | None:  # fmt: skip
    """Returns why a backend's kernels do not support these inputs, or None if they do."""
    devices = rules.shard_count("heads", queries.shape[-2])
    if dropout is not None and rules.partitioned() and (devices > 1 or queries.ndim != 4):
        return "has no dropout if heads are sharded, or if there are several leading axes"
    if backend == "gpu":
        if bias is not None and queries.shape[-1] > _WIDEST_WITH_BIAS:
            return f"has a bias for heads of 64 or 128, not of {queries.shape[-1]}"
        return gpu.refusal(queries, queries.shape[-3], keys.shape[-3])
    heads = tuple(x[..., : x.shape[-2] // devices, :] for x in (queries, keys))
    return tpu.slab_refusal(*heads, biased=bias is not None, own_masks=mask.shape[-2] > 1)


def attend_part(
    queries: Float[Array, "*B T H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H T S"] | None,
    mask: Bool[Array, "*#B #T S"],
    dropout: Dropout | None = None,
    *,
    backend: str,
    interpret: Any = None,
) -> AttentionPart:
    """Implements `api.attend` and `api.attend_part`.

    Dropout drops the same weights as `xla.attend_part` drops on GPUs and TPUs. If `interpret` is
    not None, it is passed to Pallas, which then runs the kernels without a TPU or GPU.
    """
    mask = jnp.broadcast_to(mask, (*queries.shape[:-3], *mask.shape[-2:]))
    rate, random_keys = 0.0, None
    if dropout is not None:
        rate, random_keys = dropout.rate, dropout_hash.query_keys(dropout, queries.shape[-3])
    local: Any = functools.partial(_local, backend=backend, rate=rate, interpret=interpret)
    if rules.partitioned() and queries.ndim > 3:
        lead = "lanes", *[None] * (queries.ndim - 4)
        by_head = rules.partition_spec(*lead, None, "heads", None, shape=queries.shape)
        by_lane = P(*by_head[: queries.ndim - 3])
        in_specs = by_head, by_head, by_head, P(by_head[-2]), by_lane, P()
        results = AttentionPart(by_head, P(*by_head[:-1]))
        local = dispatch.on_devices(local, in_specs, results)
    return local(queries, keys, values, bias, mask, random_keys)


def _local(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    random_keys: Array | None, *, backend: str, rate: float, interpret: Any,
) -> AttentionPart:  # fmt: skip
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (queries, keys, values))
    seen, words = mask.reshape(-1, *mask.shape[-2:]), None
    if random_keys is not None:
        words = dropout_hash.draw_words(random_keys, len(q), q.shape[2] * k.shape[1])
    if backend == "gpu":
        part = gpu.attend(
            q, k, v, gpu.mask_spans(seen), whole_tiles=True, bias=bias, mask=seen, draws=words,
            rate=rate, interpret=interpret,
        )  # fmt: skip
    else:
        part = tpu.attend_to_slab(q, k, v, bias, seen, words, rate=rate, interpret=interpret)
    return AttentionPart(part.output.reshape(queries.shape), part.lse.reshape(queries.shape[:-1]))
