"""Window attention of a segment behind its cache, which devices share by lanes, heads and blocks.

Each computes its part by itself: what an implementation is, a kernel above all, is nothing that a
compiler could cut. Of blocks it reads one window of keys and values beyond its own tokens, those
of its left neighbour; the first one reads the cache.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops.dropout import DropoutMask
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention.api import window_part

_AXIS = "sequence"


def segment_part(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: DropoutMask | None = None,
    *,
    attend_to_self: bool = True,
    null_keys: bool = False,
    scale: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> AttentionPart:
    """`window_part` of a segment that devices share."""
    by_block = rules.count("blocks", cache_mask.shape[1]) > 1

    def local(q, cached, k, v, bias, cache_mask, dropout, scale):
        if by_block:
            cached = _left(cached[0], k), _left(cached[1], v)
        return window_part(
            q, cached, k, v, bias, cache_mask, dropout, attend_to_self=attend_to_self,
            null_keys=null_keys, scale=scale, implementation=implementation,
        )  # fmt: skip

    inputs = queries, cached, keys, values, bias, cache_mask, dropout, scale
    if not rules.partitioned():
        return local(*inputs)
    tokens, blocks = ("tokens", "blocks") if by_block else (None, None)
    by_token = rules.partition_spec("lanes", tokens, "heads", None, shape=queries.shape)
    before = rules.partition_spec("lanes", None, "heads", None, shape=cached[0].shape)
    of_heads = P(by_token[2])
    return jax.shard_map(
        local,
        in_specs=(
            by_token, (before, before), by_token, by_token, of_heads,
            rules.partition_spec("lanes", blocks, shape=cache_mask.shape), of_heads, of_heads,
        ),
        out_specs=AttentionPart(by_token, P(*by_token[:3])),
        axis_names=rules.axes(), check_vma=False,
    )(*inputs)  # fmt: skip


def _left(cached: Float[Array, "B W H K"], own: Float[Array, "B T H K"]) -> Array:
    """The window before a device's own tokens."""
    last, size = own[:, -cached.shape[1] :], jax.lax.axis_size(_AXIS)
    from_left = jax.lax.ppermute(last, _AXIS, [(i, i + 1) for i in range(size - 1)])
    return jnp.where(jax.lax.axis_index(_AXIS) == 0, cached, from_left)


def last_block(x: Float[Array, "B T H K"], window: int) -> Float[Array, "B W H K"]:
    """The last `window` tokens of a segment, on every device."""
    if rules.count("blocks", x.shape[1] // window) == 1:
        return x[:, -window:]

    def local(own: Array) -> Array:
        is_last = jax.lax.axis_index(_AXIS) == jax.lax.axis_size(_AXIS) - 1
        return jax.lax.psum(jnp.where(is_last, own[:, -window:], 0), _AXIS)

    shared = jax.shard_map(
        local, in_specs=P(None, _AXIS), out_specs=P(), axis_names={_AXIS}, check_vma=False
    )
    return shared(x)
