"""Window attention of a segment behind its cache, which devices may share by whole blocks.

Each of them reads one window of keys and values beyond its own tokens, those of its left
neighbour; the first one reads the cache.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention.api import window_part

_AXIS = "sequence"


def segment_part(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    bias: Float[Array, "H W"] | None,
    readable: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None = None,
    *,
    attend_to_self: bool = True,
    null_keys: bool = False,
    implementation: str | None = None,
) -> AttentionPart:
    """`window_part` of tokens whose keys and values are not joined to the `cached` ones yet."""

    def attend(q, pairs, bias, readable, dropout):
        joined_keys, joined_values = (jnp.concatenate(pair, axis=1) for pair in pairs)
        return window_part(
            q, joined_keys, joined_values, bias, readable, dropout, attend_to_self=attend_to_self,
            null_keys=null_keys, implementation=implementation,
        )  # fmt: skip

    if rules.count("blocks", readable.shape[1]) == 1:
        return attend(queries, zip(cached, (keys, values), strict=True), bias, readable, dropout)

    def local(q, cached, k, v, bias, readable, dropout):
        pairs = zip(cached, (k, v), strict=True)
        return attend(q, [(_left(*pair), pair[1]) for pair in pairs], bias, readable, dropout)

    tokens = P(None, _AXIS)
    return jax.shard_map(
        local, in_specs=(tokens, P(), tokens, tokens, P(), tokens, P()), out_specs=tokens,
        axis_names={_AXIS}, check_vma=False,
    )(queries, cached, keys, values, bias, readable, dropout)  # fmt: skip


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
