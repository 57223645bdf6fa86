"""Reformer's attention by locality-sensitive hashing (Kitaev et al. 2020, section 2).

Keys are the normalised queries. A round sorts tokens by the bucket that random planes hash
them to, and cuts them into chunks; a token sees its chunk and the one before. As in the
clustered attention paper's code, and unlike Kitaev's: nothing is before the first chunk,
buckets only sort (a chunk may span several), and rounds weigh the same.

Which tokens share a chunk depends on the whole sequence, so a causal mask alone does not
make this attention causal.

Letters beside the glossary's: R rounds, P planes of a round (half its buckets), N chunks of
C tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dropout import Dropout
from brt.ops.masked_attention import masked_softmax
from brt.ops.normalization import l2_normalize

SELF = -1e9  # a token's logit for itself where it attends to itself only for want of others


def random_planes(
    key: jax.Array, *, rounds: int, buckets: int, width: int
) -> Float[Array, "R P K"]:
    """Planes through the origin, of every round; all heads and examples share them."""
    return jax.random.normal(key, (rounds, buckets // 2, width))


def bucket_ids(x: Float[Array, "B T H K"], planes: Float[Array, "R P K"]) -> Int[Array, "R B H T"]:
    """int32 in [0, 2P): the plane x is farthest from, P added where it is on the far side."""
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
    attend_to_self: bool = True,
) -> Float[Array, "B T H K"]:
    """The mean of all rounds; padding comes behind all buckets, so it moves no token.

    See `attend_in_chunks`.
    """
    ids = bucket_ids(jax.lax.stop_gradient(queries), planes)
    ids = jnp.where(valid[None, :, None], ids, 2 * planes.shape[1])
    return attend_in_chunks(
        queries, values, valid, ids, dropout,
        chunk=chunk, scale=scale, attend_to_self=attend_to_self,
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
    attend_to_self: bool = True,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    """Attention within chunks of the tokens sorted by bucket, of equal ones by place.

    Args:
      valid: False on padding, which nothing sees. A query that sees nothing gives zeros.
      ids: int32, the bucket of every token; the results of all rounds are averaged.
      dropout: of each round's weights [B, H, N, C, 2C].
      chunk: C; any number of tokens will do.
      scale: of the logits q.k, with k = q / |q|.
      attend_to_self: False: only where a token sees nothing else (Kitaev, section 2).
      causal: later tokens are masked; chunks depend on them all the same.

    Returns:
      In the dtype of `values`; softmax in float32.
    """
    tokens = queries.shape[1]
    more = -tokens % chunk
    x = (queries * scale, l2_normalize(queries), values)
    q, k, v = (jnp.pad(a.swapaxes(1, 2), ((0, 0), (0, 0), (0, more), (0, 0))) for a in x)
    valid = jnp.pad(valid, ((0, 0), (0, more)))
    ids = jnp.pad(
        ids, ((0, 0), (0, 0), (0, 0), (0, more)), constant_values=jnp.iinfo(ids.dtype).max
    )
    total = jnp.zeros_like(v)
    for i, of_round in enumerate(ids):
        dropped = dropout.part(i) if dropout else None
        total += _round(q, k, v, valid, of_round, dropped, chunk, attend_to_self, causal)
    return (total / len(ids))[:, :, :tokens].swapaxes(1, 2)


def _round(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T K"],
    valid: Bool[Array, "B T"],
    ids: Int[Array, "B H T"],
    dropout: Dropout | None,
    chunk: int,
    attend_to_self: bool,
    causal: bool,
) -> Float[Array, "B H T K"]:
    order = jnp.argsort(ids, axis=-1, stable=True)
    inverse = jnp.argsort(order, axis=-1)
    q, k, v = (_chunks(_permuted(x, order, inverse), chunk) for x in (q, k, v))
    logits = jnp.einsum(
        "bhnqk,bhnsk->bhnqs", q, _with_previous(k), preferred_element_type=jnp.float32
    )
    there = jnp.take_along_axis(valid[:, None], order, axis=-1)
    seen = _with_previous(_chunks(there, chunk))[..., None, :]
    place = _chunks(order, chunk)
    offset = _with_previous(place)[..., None, :] - place[..., None]  # of the key from the query
    if causal:
        seen &= offset <= 0
    if not attend_to_self:
        logits = jnp.where(offset == 0, SELF, logits)
    weights = masked_softmax(logits, seen).astype(v.dtype)
    if dropout is not None:
        weights = dropout(weights)
    y = jnp.einsum("bhnqs,bhnsk->bhnqk", weights, _with_previous(v))
    return _permuted(y.reshape(*y.shape[:2], -1, y.shape[-1]), inverse, order)


def _chunks(x: Array, chunk: int) -> Array:
    """[B, H, T, ...] -> [B, H, N, C, ...]"""
    return x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])


def _with_previous(x: Array) -> Array:
    """[B, H, N, C, ...] -> [B, H, N, 2C, ...]: each chunk behind the one before, first zeros."""
    previous = jnp.concatenate([jnp.zeros_like(x[:, :, :1]), x[:, :, :-1]], axis=2)
    return jnp.concatenate([previous, x], axis=3)


@jax.custom_vjp
def _permuted(
    x: Float[Array, "B H T K"], order: Int[Array, "B H T"], inverse: Int[Array, "B H T"]
) -> Float[Array, "B H T K"]:
    """x[order]; its gradient is taken in the inverse order, where autodiff would scatter."""
    return jnp.take_along_axis(x, order[..., None], axis=2, mode="promise_in_bounds")


def _permuted_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, tuple[Array, Array]]:
    return _permuted(x, order, inverse), (order, inverse)


def _permuted_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    order, inverse = saved
    return _permuted(gradient, inverse, order), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)
