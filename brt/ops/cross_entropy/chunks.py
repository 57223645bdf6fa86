"""Chunks of tokens, whose logits are computed one chunk after the other.

In shapes, B is the number of rows of the batch, T of tokens of a row, C of tokens of a chunk, and D
of numbers of a token's vector.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.distributed.rules import shard_count
from brt.ops.cross_entropy.scored import TokenScores


def chunk_length(tokens: int, limit: int) -> int:
    """Returns the number of tokens of a row that each device contributes to a chunk.

    The tokens of a row may be divided among several devices. The result is the largest number up to
    `limit` that divides the number of a row's tokens on one device.

    Args:
      tokens: the number of tokens of a row on all devices.
      limit: the largest number of tokens to return.
    """
    own = tokens // shard_count("tokens", tokens)
    return next(n for n in range(min(limit, own), 0, -1) if own % n == 0)


def split_chunks(x: Array, chunk: int) -> Array:
    """Splits an array x [B, T, ...] into chunks of C tokens, [number of chunks, B, C, ...].

    C is `chunk` times the number of devices among which the tokens of a row are divided. Each chunk
    has `chunk` tokens of each of these devices, so every token stays on its device.
    """
    batch, tokens = x.shape[:2]
    devices = shard_count("tokens", tokens)
    cut = x.reshape(batch, devices, -1, chunk, *x.shape[2:])
    return jnp.moveaxis(cut, 2, 0).reshape(-1, batch, devices * chunk, *x.shape[2:])


def join_chunks(x: Array, chunk: int) -> Array:
    """Joins chunks x [number of chunks, B, C, ...] to an array [B, T, ...].

    This is the inverse of `split_chunks` with the same `chunk`.
    """
    cut = x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])
    return jnp.moveaxis(cut, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])


def scores_by_chunk(
    score_chunk: Callable[[tuple[Array, Array]], TokenScores],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    chunk: int,
) -> TokenScores:
    """Returns the scores of all targets, computed one chunk of tokens after the other.

    Args:
      score_chunk: returns the scores of a chunk, given its vectors [B, C, D] and targets [B, C].
      hidden, targets: the vectors of the tokens, and the token to score at each position.
      chunk: the number of tokens of a row in a chunk, from `chunk_length`.
    """
    pieces = split_chunks(hidden, chunk), split_chunks(targets, chunk)
    return TokenScores(*(join_chunks(x, chunk) for x in jax.lax.map(score_chunk, pieces)))
