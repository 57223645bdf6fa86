"""Oracle top-k attention and Reformer's attention in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dropout import Dropout
from brt.ops.masked_attention import valid_mask
from brt.ops.normalization import l2_normalize
from brt.ops.softmax import masked_softmax
from brt.ops.top_k import top_k

# With `attend_to_self=False`, a token's logit for itself is replaced by this number, which is far
# below all other logits but not masked. The token then attends to itself only if it sees no other
# token.
SELF = -1e9


def oracle_top_k(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    dropout: Dropout | None = None,
    *,
    count: int,
    scale: float,
    causal: bool = False,
) -> Float[Array, "B T H K"]:
    mask = valid_mask(valid, queries.shape[1], causal)[:, None]
    logits = jnp.einsum(
        "bqhk,bshk->bhqs", queries * scale, keys, preferred_element_type=jnp.float32
    )
    ranked = jnp.where(mask, jax.lax.stop_gradient(logits), -jnp.inf)
    best, _ = top_k(ranked, min(count, keys.shape[1]))
    weights = masked_softmax(logits, mask & (ranked >= best[..., -1:])).astype(values.dtype)
    if dropout is not None:
        weights = dropout(weights)
    return jnp.einsum("bhqs,bshk->bqhk", weights, values)


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
    tokens = queries.shape[1]
    more = -tokens % chunk
    x = (queries * scale, l2_normalize(queries), values)
    q, k, v = (jnp.pad(a.swapaxes(1, 2), ((0, 0), (0, 0), (0, more), (0, 0))) for a in x)
    valid = jnp.pad(valid, ((0, 0), (0, more)))
    ids = jnp.pad(
        ids, ((0, 0), (0, 0), (0, 0), (0, more)), constant_values=jnp.iinfo(ids.dtype).max
    )
    total = jnp.zeros_like(v)
    for i, round_ids in enumerate(ids):
        dropped = dropout.part(i) if dropout else None
        total += _round(q, k, v, valid, round_ids, dropped, chunk, attend_to_self, causal)
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
    q, k, v = (_chunks(_permute(x, order, inverse), chunk) for x in (q, k, v))
    logits = jnp.einsum(
        "bhnqk,bhnsk->bhnqs", q, _with_previous(k), preferred_element_type=jnp.float32
    )
    sorted_valid = jnp.take_along_axis(valid[:, None], order, axis=-1)
    mask = _with_previous(_chunks(sorted_valid, chunk))[..., None, :]
    place = _chunks(order, chunk)
    # Entry [row, head, chunk, query, key] of `offset` is the position of the key in the sequence
    # minus the position of the query.
    offset = _with_previous(place)[..., None, :] - place[..., None]
    if causal:
        mask &= offset <= 0
    if not attend_to_self:
        logits = jnp.where(offset == 0, SELF, logits)
    weights = masked_softmax(logits, mask).astype(v.dtype)
    if dropout is not None:
        weights = dropout(weights)
    y = jnp.einsum("bhnqs,bhnsk->bhnqk", weights, _with_previous(v))
    return _permute(y.reshape(*y.shape[:2], -1, y.shape[-1]), inverse, order)


def _chunks(x: Array, chunk: int) -> Array:
    """Splits [B, H, T, ...] into chunks [B, H, N, C, ...]."""
    return x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])


def _with_previous(x: Array) -> Array:
    # The result is [B, H, N, 2C, ...]. Zeros stand before the first chunk.
    previous = jnp.concatenate([jnp.zeros_like(x[:, :, :1]), x[:, :, :-1]], axis=2)
    return jnp.concatenate([previous, x], axis=3)


@jax.custom_vjp
def _permute(
    x: Float[Array, "B H T K"], order: Int[Array, "B H T"], inverse: Int[Array, "B H T"]
) -> Float[Array, "B H T K"]:
    """Returns x[order]; the gradient uses the inverse order, where autodiff would scatter."""
    return jnp.take_along_axis(x, order[..., None], axis=2, mode="promise_in_bounds")


def _permute_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, tuple[Array, Array]]:
    return _permute(x, order, inverse), (order, inverse)


def _permute_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    order, inverse = residuals
    return _permute(gradient, inverse, order), None, None


_permute.defvjp(_permute_forward, _permute_backward)
