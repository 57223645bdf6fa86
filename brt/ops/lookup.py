"""Embedding lookup, with little communication if the table is sharded over devices."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.distributed.rules import constrain, partitioned


@jax.named_scope("lookup")
def lookup(
    table: Float[Array, "V D"], ids: Int[Array, "*B"], dtype: jnp.dtype, axis: str | None
) -> Float[Array, "*B D"]:
    """Returns the rows of the table with the given ids, in `dtype`.

    `axis` is the logical name of the table's first axis, for `brt.distributed.rules`.
    """
    if not partitioned():
        return jnp.take(table, ids, axis=0).astype(dtype)
    return _lookup_sharded(table, ids, jnp.dtype(dtype).name, axis)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup_sharded(table: Array, ids: Array, dtype: str, axis: str | None) -> Array:
    # Each device converts its columns to `dtype`, usually a smaller dtype than that of the table,
    # before it gathers the columns of other devices.
    whole = constrain(table.astype(dtype), axis, None)
    return _shard_by_lane(jnp.take(whole, ids, axis=0))


def _forward(
    table: Array, ids: Array, dtype: str, axis: str | None
) -> tuple[Array, tuple[Array, Array]]:
    return _lookup_sharded(table, ids, dtype, axis), (ids, jnp.zeros((len(table), 0), table.dtype))


@jax.named_scope("lookup")
def _backward(
    dtype: str, axis: str | None, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, None]:
    ids, rows = residuals
    zeros = jnp.zeros((len(rows), gradient.shape[-1]), rows.dtype)
    total = zeros.at[ids].add(_shard_by_lane(gradient.astype(rows.dtype)))
    # The gradient is sharded after the scatter, because a scatter into shards would move data
    # between devices.
    return constrain(total, axis, None), None


def _shard_by_lane(x: Array) -> Array:
    """Shards a batch of sequences by rows and tokens; other arrays stay as they are."""
    return constrain(x, "lanes", "tokens", None) if x.ndim == 3 else x


_lookup_sharded.defvjp(_forward, _backward)
