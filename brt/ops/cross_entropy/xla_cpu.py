"""Token scores on CPUs, one tile of W tokens of the vocabulary at a time.

XLA's CPU backend is slow at products of vectors with a matrix of many columns, because it reads
each column across the whole matrix. A tile has few columns. Its logits stay in the caches of the
processor, and only their sums are stored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.distributed.rules import partitioned
from brt.ops.cross_entropy.chunks import Targets, TokenScores, chunk_length, scores_by_chunk
from brt.ops.layout import row_major, transposed
from brt.ops.softmax import soft_capped

# A tile has this many tokens of the vocabulary. Sizes from 512 to 1,024 take the least time.
_TILE = 512


class _Sums(NamedTuple):
    """What is known of the logits after some tiles of the vocabulary."""

    largest: Float[Array, "B C"]  # the largest logit
    # the sum of exp(logit - largest), or of exp(logit) if `largest` is not finite
    exponentials: Float[Array, "B C"]
    target: Float[Array, "B C"]  # the logit of the target; -inf if no tile so far has the target
    other: Float[Array, "B C"]  # the largest logit of all tokens but the target


def refusal(inputs: Targets, **_: object) -> str | None:
    if partitioned():
        return "the arrays may be sharded over several devices"
    if len(inputs.embedding) < 2 * _TILE:
        tokens = len(inputs.embedding)
        return f"a vocabulary of {tokens} tokens is smaller than two tiles of {_TILE}"
    return None


def token_scores(
    inputs: Targets, *, scale: float, chunk: int, soft_cap: float = 0.0
) -> TokenScores:
    hidden, embedding, targets, bias, _ = inputs
    chunk = chunk_length(hidden.shape[1], chunk)
    table, tiles = embedding.astype(hidden.dtype), len(embedding) // _TILE

    def add_tile(
        sums: _Sums, x: Array, own: Array, start: int | Array, tokens: int = _TILE
    ) -> _Sums:
        vectors = jax.lax.dynamic_slice_in_dim(table, start, tokens)
        products = jnp.matmul(x, transposed(vectors), preferred_element_type=jnp.float32)
        logits = soft_capped(scale * row_major(products), soft_cap)
        if bias is not None:
            logits += jax.lax.dynamic_slice_in_dim(bias, start, tokens)[None, None]
        return _added(sums, logits, jnp.arange(tokens)[None, None] == (own - start)[..., None])

    def score_chunk(piece: tuple[Array, Array]) -> TokenScores:
        x, own = piece
        sums, _ = jax.lax.scan(
            lambda sums, start: (add_tile(sums, x, own, start), None),
            _none(own.shape),
            jnp.arange(tiles) * _TILE,
        )
        if rest := len(table) - tiles * _TILE:
            sums = add_tile(sums, x, own, tiles * _TILE, rest)
        nats = jnp.log(sums.exponentials) + _finite(sums.largest) - sums.target
        return TokenScores(nats, sums.target > sums.other)

    return scores_by_chunk(score_chunk, hidden, targets, chunk)


def _none(shape: tuple[int, ...]) -> _Sums:
    lowest = jnp.full(shape, -jnp.inf)
    return _Sums(lowest, jnp.zeros(shape), lowest, lowest)


def _added(sums: _Sums, logits: Float[Array, "B C W"], is_target: Bool[Array, "B C W"]) -> _Sums:
    target = jnp.maximum(sums.target, jnp.max(jnp.where(is_target, logits, -jnp.inf), axis=-1))
    other = jnp.maximum(sums.other, jnp.max(jnp.where(is_target, -jnp.inf, logits), axis=-1))
    largest = jnp.maximum(target, other)
    shift = _finite(largest)
    earlier_sum = sums.exponentials * jnp.exp(sums.largest - shift)
    tile_sum = jnp.sum(jnp.exp(logits - shift[..., None]), axis=-1)
    return _Sums(largest, earlier_sum + tile_sum, target, other)


def _finite(largest: Float[Array, "B C"]) -> Float[Array, "B C"]:
    """Returns the largest logit, or 0 if it is not finite.

    `jax.nn.logsumexp` subtracts the same number.
    """
    return jnp.where(jnp.isfinite(largest), largest, 0.0)
