"""The largest of many numbers, found where they are.

XLA gathers what `jax.lax.top_k` reads onto every device, even if only leading axes are
spread over devices. Told that rows are independent it leaves them there.
"""

from functools import partial

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jaxtyping import Array, Float, Int


@partial(custom_partitioning, static_argnums=(1,))
def _top_k(x: Array, count: int) -> tuple[Array, Array]:
    return tuple(jax.lax.top_k(x, count))


def _partition(count: int, mesh: jax.sharding.Mesh, arguments: tuple, _: tuple) -> tuple:
    spec = arguments[0].sharding.spec[: len(arguments[0].shape) - 1]  # each row whole
    rows = jax.NamedSharding(mesh, jax.P(*spec))
    return mesh, lambda x: tuple(jax.lax.top_k(x, count)), (rows, rows), (rows,)


_top_k.def_partition(
    partition=_partition, sharding_rule="... m -> ... k, ... k", need_replication_factors=("m", "k")
)


def top_k(x: Float[Array, "*B M"], count: int) -> tuple[Float[Array, "*B R"], Int[Array, "*B R"]]:
    """The `count` largest of the last axis, largest first, and their indices; exact."""
    return _top_k(x, count)
