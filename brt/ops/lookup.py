"""Rows of a table."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.distributed.rules import constrain, partitioned


@jax.named_scope("lookup")
def lookup(
    table: Float[Array, "V D"], ids: Int[Array, "*B"], dtype: jnp.dtype, axis: str | None
) -> Float[Array, "*B D"]:
    """The rows of some ids, in `dtype`; their gradients are added up in the table's.

    Devices that share the table's columns fetch all of them before, in the smaller dtype.

    Args:
      axis: the name of the table's rows (`brt.distributed.rules`).
    """
    if not partitioned():
        return jnp.take(table, ids, axis=0).astype(dtype)
    return _fetched(table, ids, jnp.dtype(dtype).name, axis)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _fetched(table: Array, ids: Array, dtype: str, axis: str | None) -> Array:
    whole = constrain(table.astype(dtype), axis, None)
    return _by_lane(jnp.take(whole, ids, axis=0))


def _forward(
    table: Array, ids: Array, dtype: str, axis: str | None
) -> tuple[Array, tuple[Array, Array]]:
    return _fetched(table, ids, dtype, axis), (ids, jnp.zeros((len(table), 0), table.dtype))


@jax.named_scope("lookup")
def _backward(
    dtype: str, axis: str | None, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, None]:
    ids, rows = saved
    zeros = jnp.zeros((len(rows), gradient.shape[-1]), rows.dtype)
    total = zeros.at[ids].add(_by_lane(gradient.astype(rows.dtype)))
    return constrain(total, axis, None), None  # cut later: scattering into parts moves data


def _by_lane(x: Array) -> Array:
    """Of a batch of sequences or of anything else."""
    return constrain(x, "lanes", "tokens", None) if x.ndim == 3 else x


_fetched.defvjp(_forward, _backward)
