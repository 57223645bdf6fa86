"""Attention methods that clustered attention is compared with: oracle top-k and Reformer.

Reformer (Kitaev et al. 2020, section 2) takes the normalized queries as keys. A round of hashing
assigns each token to a bucket by random planes, sorts the tokens by bucket, and splits them into
chunks. A token sees its own chunk and the chunk before. As in the code of Vyas et al. 2020, and
unlike Kitaev's, no chunk precedes the first one, buckets only determine the order of tokens (a
chunk may span several buckets), and all rounds have equal weight. Which tokens share a chunk
depends on the complete sequence, so the attention is not causal.

In shapes, X is the number of keys, R the number of rounds, P the number of planes of a round (half
the number of its buckets), N the number of chunks, and C the number of tokens of a chunk.

The implementations in plain XLA follow these definitions closely, so they are also the references.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.normalization import l2_normalize
from brt.ops.softmax import masked_softmax
from brt.ops.top_k import top_k


def oracle_top_k(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    dropout: Dropout | None = None,
    *,
    count: int,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention of every query to the `count` keys with the largest logits for it.

    This is "oracle-top" of Vyas et al. 2020, section 4.1. If further keys have the same logit as
    the last of the `count` keys, they are included, so the order of keys does not matter. A query
    that sees no key gets zeros.

    Args:
      queries: not yet multiplied by `scale`, the factor of the logits.
      valid: False for padding, which no query sees.
    """
    return dispatch.run(
        ORACLE_TOP_K, implementation, queries, keys, values, valid,
        dropout=dropout, count=count, scale=scale,
    )  # fmt: skip


def random_planes(
    key: jax.Array, *, rounds: int, buckets: int, width: int
) -> Float[Array, "R P K"]:
    """Returns normal vectors of random planes through the origin, shared by all heads."""
    return jax.random.normal(key, (rounds, buckets // 2, width))


def bucket_ids(x: Float[Array, "B T H K"], planes: Float[Array, "R P K"]) -> Int[Array, "R B H T"]:
    """Returns the bucket of each vector in each round, int32 in [0, 2P).

    Each plane has a dot product of its normal vector and x. The bucket is the index of the plane
    whose dot product has the largest magnitude, plus P if this dot product is negative.
    """
    projected = jnp.einsum(
        "bthk,rpk->rbhtp", x.astype(jnp.float32), planes, precision=jax.lax.Precision.HIGHEST
    )
    both = jnp.concatenate([projected, -projected], axis=-1)
    return jnp.argmax(both, axis=-1).astype(jnp.int32)


def reformer(
    queries: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    valid: Bool[Array, "B T"],
    planes: Float[Array, "R P K"],
    dropout: Dropout | None = None,
    *,
    chunk: int,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns Reformer's attention, with the buckets of `bucket_ids`; see `attend_in_chunks`.

    Padding gets a bucket after all others, so it does not change which tokens share a chunk.
    """
    ids = bucket_ids(jax.lax.stop_gradient(queries), planes)
    ids = jnp.where(valid[None, :, None], ids, 2 * planes.shape[1])
    return attend_in_chunks(
        queries, values, valid, ids, dropout,
        chunk=chunk, scale=scale, implementation=implementation,
    )  # fmt: skip


def attend_in_chunks(
    queries: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    valid: Bool[Array, "B T"],
    ids: Int[Array, "R B H T"],
    dropout: Dropout | None = None,
    *,
    chunk: int,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns Reformer's attention, averaged over the rounds, for given buckets `ids`.

    Tokens of one bucket stay in the order of their positions. A query that sees no key gets zeros.

    Args:
      queries: not yet multiplied by `scale`, the factor of the logits; the keys are the
        normalized queries.
      valid: False for padding, which no query sees.
      dropout: applied to each round's attention weights [B, H, N, C, 2C].
      chunk: C; T need not be a multiple of C.
    """
    return dispatch.run(
        REFORMER, implementation, queries, values, valid, ids,
        dropout=dropout, chunk=chunk, scale=scale,
    )  # fmt: skip


def _oracle_top_k(
    queries: Array, keys: Array, values: Array, valid: Array, *, dropout: Dropout | None,
    count: int, scale: float,
) -> Array:  # fmt: skip
    mask = valid[:, None, None]
    logits = jnp.einsum(
        "bqhk,bshk->bhqs", queries * scale, keys, preferred_element_type=jnp.float32
    )
    ranked = jnp.where(mask, jax.lax.stop_gradient(logits), -jnp.inf)
    best, _ = top_k(ranked, min(count, keys.shape[1]))
    weights = masked_softmax(logits, mask & (ranked >= best[..., -1:])).astype(values.dtype)
    if dropout is not None:
        weights = dropout(weights)
    return jnp.einsum("bhqs,bshk->bqhk", weights, values)


def _attend_in_chunks(
    queries: Array, values: Array, valid: Array, ids: Array, *, dropout: Dropout | None,
    chunk: int, scale: float,
) -> Array:  # fmt: skip
    tokens = queries.shape[1]
    padding = -tokens % chunk
    x = (queries * scale, l2_normalize(queries), values)
    q, k, v = (jnp.pad(a.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0))) for a in x)
    valid = jnp.pad(valid, ((0, 0), (0, padding)))
    ids = jnp.pad(
        ids, ((0, 0), (0, 0), (0, 0), (0, padding)), constant_values=jnp.iinfo(ids.dtype).max
    )
    total = jnp.zeros_like(v)
    for i, round_ids in enumerate(ids):
        dropped = dropout.part(i) if dropout else None
        total += _round(q, k, v, valid, round_ids, dropped, chunk)
    return (total / len(ids))[:, :, :tokens].swapaxes(1, 2)


def _round(
    q: Float[Array, "B H T K"], k: Float[Array, "B H T K"], v: Float[Array, "B H T K"],
    valid: Bool[Array, "B T"], ids: Int[Array, "B H T"], dropout: Dropout | None, chunk: int,
) -> Float[Array, "B H T K"]:  # fmt: skip
    order = jnp.argsort(ids, axis=-1, stable=True)
    inverse = jnp.argsort(order, axis=-1)
    q, k, v = (_chunks(_permute(x, order, inverse), chunk) for x in (q, k, v))
    logits = jnp.einsum(
        "bhnqk,bhnsk->bhnqs", q, _with_previous(k), preferred_element_type=jnp.float32
    )
    sorted_valid = jnp.take_along_axis(valid[:, None], order, axis=-1)
    mask = _with_previous(_chunks(sorted_valid, chunk))[..., None, :]
    weights = masked_softmax(logits, mask).astype(v.dtype)
    if dropout is not None:
        weights = dropout(weights)
    y = jnp.einsum("bhnqs,bhnsk->bhnqk", weights, _with_previous(v))
    return _permute(y.reshape(*y.shape[:2], -1, y.shape[-1]), inverse, order)


def _chunks(x: Array, chunk: int) -> Array:
    """Splits [B, H, T, ...] into chunks [B, H, N, C, ...]."""
    return x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])


def _with_previous(x: Array) -> Array:
    # Returns [B, H, N, 2C, ...], in which each chunk follows a copy of the previous chunk. Zeros
    # precede the first chunk.
    previous = jnp.concatenate([jnp.zeros_like(x[:, :, :1]), x[:, :, :-1]], axis=2)
    return jnp.concatenate([previous, x], axis=3)


@jax.custom_vjp
def _permute(
    x: Float[Array, "B H T K"], order: Int[Array, "B H T"], inverse: Int[Array, "B H T"]
) -> Float[Array, "B H T K"]:
    """Returns x[order]; the gradient is a gather by the inverse order instead of a scatter."""
    return jnp.take_along_axis(x, order[..., None], axis=2, mode="promise_in_bounds")


_permute.defvjp(
    lambda x, *orders: (_permute(x, *orders), orders),
    lambda orders, gradient: (_permute(gradient, *reversed(orders)), None, None),
)


def _plain(name: str, function: Callable[..., Array]) -> Op:
    return Op(name, (Implementation("xla", function), Implementation("reference", function)))


ORACLE_TOP_K = _plain("oracle_top_k", _oracle_top_k)
REFORMER = _plain("reformer", _attend_in_chunks)
