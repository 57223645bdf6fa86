"""The largest of many numbers, found where they are.

XLA gathers what `jax.lax.top_k` reads onto every device, even if only leading axes are
spread over devices. Told that rows are independent it leaves them there. Replicas have rows
of their own.
"""

from functools import partial

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jaxtyping import Array, Float, Int

from brt.distributed import rules


@partial(custom_partitioning, static_argnums=(1,))
def _top_k(x: Array, count: int) -> tuple[Array, Array]:
    return _of_rows(x, count)


def _of_rows(x: Array, count: int) -> tuple[Array, Array]:
    """As of a matrix: of more axes, XLA's CPU backend sorts every row as a whole."""
    found = jax.lax.top_k(x.reshape(-1, x.shape[-1]), count)
    values, places = (y.reshape(*x.shape[:-1], count) for y in found)
    return values, places


def _partition(count: int, mesh: jax.sharding.Mesh, arguments: tuple, _: tuple) -> tuple:
    spec = arguments[0].sharding.spec[: len(arguments[0].shape) - 1]  # each row whole
    rows = jax.NamedSharding(mesh, jax.P(*spec))
    return mesh, lambda x: _of_rows(x, count), (rows, rows), (rows,)


_top_k.def_partition(
    partition=_partition, sharding_rule="... m -> ... k, ... k", need_replication_factors=("m", "k")
)


def top_k(x: Float[Array, "*B M"], count: int) -> tuple[Float[Array, "*B R"], Int[Array, "*B R"]]:
    """The `count` largest of the last axis, largest first, and their indices; exact."""
    if rules.in_replica():  # which XLA does not cut
        return _of_rows(x, count)
    return _top_k(x, count)
