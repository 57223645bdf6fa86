"""The gated delta rule, and the inverse of unit lower triangular matrices that it needs.

The inverse is computed here because XLA's own triangular solver is slow for many small matrices:
it takes a hundred times as long on CPUs, and computes one row after the other on accelerators.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.products import matmul_nn, matmul_nt, matmul_tn

# Matrices with at most this many rows are inverted row by row. A larger matrix is inverted from the
# inverses of its two halves, by products of matrices.
_BY_ROWS = 8


@jax.custom_vjp
def unit_lower_inverse(below: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """Returns the float32 inverse of I + A for each matrix A in `below`, which are zero on and
    above the diagonal. C is a power of two.
    """
    return _inverse(below)


def _inverse(below: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    size = below.shape[-1]
    if size <= _BY_ROWS:
        return _inverse_by_rows(below)
    half = size // 2
    first, second = _inverse(jnp.stack([below[..., :half, :half], below[..., half:, half:]]))
    corner = -_product(second, _product(below[..., half:, :half], first))
    rows = [first, jnp.zeros_like(first)], [corner, second]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def _inverse_by_rows(below: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    identity = jnp.broadcast_to(jnp.eye(below.shape[-1], dtype=below.dtype), below.shape)
    rows: list[Array] = []
    for i in range(below.shape[-1]):
        earlier = (below[..., i, j, None] * row for j, row in enumerate(rows))
        rows.append(identity[..., i, :] - sum(earlier, jnp.zeros_like(identity[..., i, :])))
    return jnp.stack(rows, axis=-2)


def _product(a: Float[Array, "*B M N"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M K"]:
    # The product is float32 on all hardware.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _forward(below: Float[Array, "*B C C"]) -> tuple[Array, Array]:
    inverse = _inverse(below)
    return inverse, inverse


def _backward(
    inverse: Float[Array, "*B C C"], gradient: Float[Array, "*B C C"]
) -> tuple[Float[Array, "*B C C"]]:
    transposed = inverse.swapaxes(-1, -2)
    return (-_product(transposed, _product(gradient, transposed)),)


unit_lower_inverse.defvjp(_forward, _backward)


# The gated delta rule: a recurrence whose state is a matrix for each head.
#
# The matrix maps keys to values. Each token multiplies the matrix by a decay, and then changes it
# so that it maps the token's key closer to the token's value (Yang, Kautz and Hatamizadeh 2024,
# arXiv 2412.06464, section 3). In shapes, K and V are the numbers of channels of a key and a value,
# N is the number of chunks, and C of tokens of a chunk. The other letters of shapes are those of
# `brt.layers.state`.


class DeltaInputs(NamedTuple):
    """The inputs of the gated delta rule for the tokens of a segment.

    Token t changes the state S [K, V] of a head to

        S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T

    and then reads the vector S_t^T q_t from it. The equation equals S_t = a_t (I - b_t k_t k_t^T)
    S_(t-1) + b_t k_t v_t^T, the transpose of the paper's equation 10.
    """

    queries: Float[Array, "B T H K"]  # q
    keys: Float[Array, "B T H K"]  # k, of length 1
    values: Float[Array, "B T H V"]  # v
    log_decay: Float[Array, "B T H"]  # The logarithm of a, at most 0, in float32.
    strength: Float[Array, "B T H"]  # b, between 0 and 1, in float32.


def delta_step(
    token: DeltaInputs, state: Float[Array, "B H K V"]
) -> tuple[Float[Array, "B 1 H V"], Float[Array, "B H K V"]]:
    """Computes the rule for one token of each row; returns what each head reads from the new state,
    and the new state, both float32.
    """
    query, key, value = (x[:, 0].astype(jnp.float32) for x in token[:3])
    state = jnp.exp(token.log_decay[:, 0])[..., None, None] * state
    wrong = value - jnp.sum(key[..., None] * state, axis=-2)
    written = token.strength[:, 0][..., None] * wrong
    state = state + key[..., None] * written[..., None, :]
    return jnp.sum(query[..., None] * state, axis=-2)[:, None], state


def delta_rule(
    tokens: DeltaInputs,
    state: Float[Array, "B H K V"],
    since_start: Int[Array, "B T"],
    *,
    chunk: int,
    unroll: int = 1,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Computes the gated delta rule for all tokens of a segment, in chunks. Returns the vectors
    that the tokens read from the state, and the state after the segment, both float32.

    The tokens of a chunk are computed at once (section 3.3 of the paper). Token t adds k_t u_t^T to
    the decayed state. The rows u_t of a chunk, U [C, V], follow from the keys K and values V of the
    chunk and from the state S before the chunk: U = X (b V) - X (b d K) S, where d is the decay
    since the beginning of the chunk, and X the inverse of a unit lower triangular matrix of
    products of the keys. X and all other terms without S are computed for all chunks at once, and
    then a scan over the chunks computes the states. Every decay is computed as the factor from one
    token of a chunk to a later one, which is never above 1, so nothing overflows.

    Args:
      since_start: the result of `brt.memories.token_state.tokens_since_start`. A document reads
        nothing from before its start.
      chunk: the largest number of tokens of a chunk, a power of two.
      unroll: the number of chunks in one iteration of the scan.
    """
    length = tokens.queries.shape[1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    chunks = -(-length // chunk)
    padding = chunks * chunk - length
    queries, keys, values, log_decay, strength = (
        _by_chunk(x, chunk, padding) for x in tokens
    )  # Tokens of padding have the decay 1 and the strength 0, so they do not change the state.
    places = since_start[:, -1:] + 1 + jnp.arange(padding)[None]
    since = _by_chunk(jnp.concatenate([since_start, places], axis=1)[..., None], chunk, 0)
    decay, since_chunk = _decays(log_decay, since)

    dtype = queries.dtype
    scores = matmul_nt(keys, keys)
    below = jnp.tril(decay * scores * strength[..., None], -1)
    inverse = unit_lower_inverse(below).astype(dtype)
    written = matmul_nn(inverse, values * strength[..., None].astype(dtype))
    scale = (strength * since_chunk)[..., None].astype(dtype)
    erased = matmul_nn(inverse, keys * scale).astype(dtype)
    attention = (decay * matmul_nt(queries, keys)).astype(dtype)
    queries = queries * since_chunk[..., None].astype(dtype)
    keys = keys * decay[..., -1, :, None].astype(dtype)

    def body(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        # `written` and `erased` are X (b V) and X (b d K), and `kept` is the decay of the state
        # over the chunk. The queries are multiplied by the decay since the chunk's beginning, the
        # keys by that until its end.
        queries, keys, attention, written, erased, kept = chunk
        before = state.astype(dtype)
        written = written - matmul_nn(erased, before)
        own = written.astype(dtype)
        read = matmul_nn(queries, before) + matmul_nn(attention, own)
        return kept[..., None, None] * state + matmul_tn(keys, own), read

    each = queries, keys, attention, written, erased, since_chunk[..., -1]
    state, read = jax.lax.scan(body, state, each, unroll=unroll)
    return _by_token(read, length), state


def _decays(
    log_decay: Float[Array, "N B H C"], since_start: Int[Array, "N B 1 C"]
) -> tuple[Float[Array, "N B H C C"], Float[Array, "N B H C"]]:
    # Returns the decay, up to each token of a chunk (axis -2), of what each token of the chunk
    # (axis -1) wrote, which is 0 for later tokens and for tokens of another document; and the decay
    # of the state before the chunk up to each token, which is 0 if the document started within the
    # chunk.
    place = jnp.arange(log_decay.shape[-1])[None, None, None]
    distance = place[..., :, None] - place[..., None, :]
    reads = (distance >= 0) & (distance <= since_start[..., None])
    # Each sum begins at the start of the token's document. Only differences of two sums are used,
    # so a sum could as well begin with the chunk, but then the numbers of the document before
    # would change the rounding of the differences.
    total = jnp.sum(jnp.where(reads, log_decay[..., None, :], 0), axis=-1)
    within = _exp(total[..., :, None] - total[..., None, :], reads)
    return within, _exp(total, since_start > place)


def _exp(logs: Float[Array, "*B"], where: Bool[Array, "..."]) -> Float[Array, "*B"]:
    return jnp.exp(jnp.where(where, logs, -jnp.inf))


def _by_chunk(x: Array, chunk: int, padding: int) -> Array:
    # [B, T, H] becomes [N, B, H, C], and [B, T, H, K] becomes [N, B, H, C, K].
    x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)


def _by_token(x: Float[Array, "N B H C V"], length: int) -> Float[Array, "B T H V"]:
    chunks, lanes, heads, chunk, size = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(lanes, chunks * chunk, heads, size)[:, :length]


# The gated delta rule, computed token by token.
#
# Tests compare the faster algorithm, which computes chunks of tokens, with this implementation.


def delta_rule_by_token(
    tokens: DeltaInputs, state: Float[Array, "B H K V"], since_start: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    def body(state: Array, inputs: tuple[DeltaInputs, Array]) -> tuple[Array, Array]:
        token, since = inputs
        state = jnp.where((since == 0)[:, None, None, None], 0, state)
        read, state = delta_step(DeltaInputs(*(x[:, None] for x in token)), state)
        return state, read[:, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, since_start))
    state, read = jax.lax.scan(body, state, by_token)
    return jnp.moveaxis(read, 0, 1), state
