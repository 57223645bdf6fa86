"""Softmax attention over all keys by the kernels of `brt.ops.attention`.

The functions have the arguments of an implementation of `api.attend` and `api.attend_to_blocks`,
with heads before tokens in the keys k and the values v. *N is an optional axis of blocks.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.attention import gpu, tpu
from brt.ops.normalization import scaled_unit


def key_mask(cache_mask: Bool[Array, " B"], k: Array) -> Bool[Array, "B S"]:
    """Returns a mask of the keys of two blocks, the previous block first.

    It is True for the second block, and for the previous block in rows where `cache_mask` is True.
    """
    size = k.shape[-2]
    return cache_mask[:, None] | (jnp.arange(size) >= size // 2)[None]


def slab_refusal(queries: Array, k: Array, *_: Any, **__: Any) -> str | None:
    keys = k.swapaxes(-3, -2)
    by_block = queries.reshape(*keys.shape[:-3], -1, *queries.shape[2:])
    return tpu.slab_refusal(by_block, keys)


def by_slab(
    queries: Float[Array, "B T H K"],
    k: Float[Array, "B *N H S K"],
    v: Float[Array, "B *N H S K"],
    cache_mask: Bool[Array, " B"] | None,
    *,
    scale: Float[Array, " H"] | None,
    interpret: tpu.Interpret = False,
) -> Float[Array, "B T H K"]:
    keys, values = (x.reshape(-1, *x.shape[-3:]).swapaxes(1, 2) for x in (k, v))
    mask = None if cache_mask is None else key_mask(cache_mask, k)[:, None]
    part = tpu.attend_to_slab(queries, keys, values, None, mask, scale=scale, interpret=interpret)
    return part.output


def spans_refusal(
    q: Array, k: Array, v: Array, cache_mask: Array | None = None, **_: Any
) -> str | None:
    blocks = 1 if k.ndim == q.ndim else k.shape[1]
    queries, keys = q.shape[1] // blocks, k.shape[-2] // (1 if cache_mask is None else 2)
    return gpu.refusal(q, queries, keys)


def by_spans(
    queries: Float[Array, "B T H K"],
    k: Float[Array, "B *N H S K"],
    v: Float[Array, "B *N H S K"],
    cache_mask: Bool[Array, " B"] | None,
    *,
    scale: Float[Array, " H"] | None = None,
    interpret: Any = None,
) -> Float[Array, "B T H K"]:
    if scale is not None:
        queries = scaled_unit(queries, scale)
    blocks = 1 if k.ndim == queries.ndim else k.shape[1]
    q = queries.reshape(-1, queries.shape[1] // blocks, *queries.shape[2:])
    k, v = (x.reshape(-1, *x.shape[-3:]).swapaxes(1, 2) for x in (k, v))
    size = k.shape[1]
    first = jnp.zeros(len(q), jnp.int32)
    if cache_mask is not None:
        first = jnp.where(cache_mask, 0, size // 2)
    ends = jnp.stack([first, jnp.full_like(first, size)], axis=1)[:, :, None]
    spans = jnp.broadcast_to(ends, (*ends.shape[:2], q.shape[1]))
    part = gpu.attend(q, k, v, spans, whole_tiles=True, interpret=interpret)
    return part.output.reshape(queries.shape)
