"""Top-k of each row of a sharded array without communication, and gathering of chosen vectors.

XLA gathers the input of `jax.lax.top_k` onto every device, even if only leading axes are sharded. A
custom partitioning tells XLA that rows are independent.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules


@partial(custom_partitioning, static_argnums=(1,))
def _top_k(x: Array, count: int) -> tuple[Array, Array]:
    return _local_top_k(x, count)


def _local_top_k(x: Array, count: int) -> tuple[Array, Array]:
    # The leading axes are merged, because for an array with more than two axes, XLA's CPU backend
    # sorts complete rows instead of selecting the largest values.
    result = jax.lax.top_k(x.reshape(-1, x.shape[-1]), count)
    values, indices = (y.reshape(*x.shape[:-1], count) for y in result)
    return values, indices


def _partition(count: int, mesh: jax.sharding.Mesh, arguments: tuple, _: tuple) -> tuple:
    # Only leading axes are sharded. The last axis is not, because each device needs complete rows.
    spec = arguments[0].sharding.spec[: len(arguments[0].shape) - 1]
    rows = jax.NamedSharding(mesh, jax.P(*spec))
    return mesh, lambda x: _local_top_k(x, count), (rows, rows), (rows,)


_top_k.def_partition(
    partition=_partition, sharding_rule="... m -> ... k, ... k", need_replication_factors=("m", "k")
)


def top_k(x: Float[Array, "*B M"], count: int) -> tuple[Float[Array, "*B R"], Int[Array, "*B R"]]:
    """Returns the R = `count` largest values of each row in descending order, and their indices."""
    # In a `shard_map` over replicas of the parameters, each device computes on its own arrays, and
    # XLA partitions nothing. Top-k therefore needs no custom partitioning there.
    if rules.in_replica():
        return _local_top_k(x, count)
    return _top_k(x, count)


def largest(
    x: Float[Array, "*B M"], there: Bool[Array, "*#B M"], count: int
) -> tuple[Float[Array, "*B R"], Int[Array, "*B R"], Bool[Array, "*B M"]]:
    """Returns the R = `count` largest values where `there` is True, and their indices and mask.

    The mask is True at these indices. Of equal values, the first are chosen. There is no gradient.
    """
    ranked = jnp.where(there, jax.lax.stop_gradient(x), -jnp.inf)
    values, indices = top_k(ranked, count)
    # If several entries have the value `smallest`, `top_k` takes those with the lowest indices.
    # `indices[..., -1]` is the position of the last entry that it takes.
    smallest = values[..., -1:]
    place = jnp.arange(x.shape[-1]).reshape((1,) * (x.ndim - 1) + (-1,))
    chosen = (ranked > smallest) | ((ranked == smallest) & (place <= indices[..., -1:]))
    return values, indices, chosen


def take(x: Float[Array, "B H Z K"], indices: Int[Array, "B H Q R"]) -> Float[Array, "B H Q R K"]:
    """Returns, for each head, the vectors [K] of x at the head's indices (from 0 to Z - 1)."""

    def take_in_head(x: Array, indices: Array) -> Array:
        return x.at[indices].get(mode="promise_in_bounds")

    return jax.vmap(jax.vmap(take_in_head))(x, indices)
