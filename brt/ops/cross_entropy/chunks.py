"""Inputs of losses, and chunks of C tokens of each row; only one chunk at a time has logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed.rules import shard_count


class Targets(NamedTuple):
    """The arrays of the losses: vectors of tokens, and the tokens to predict from them."""

    hidden: Float[Array, "B T D"]
    embedding: Float[Array, "V D"]
    targets: Int[Array, "B T"]
    bias: Float[Array, " V"] | None = None  # added to the logits
    mask: Any = None  # bool [B, T], the targets that the loss counts; None for `token_scores`


class TokenScores(NamedTuple):
    """Scores of the target tokens."""

    nats: Float[Array, "B T"]  # the negative log probability of the target
    # True if the target is the most probable token. If another token is equally probable, the value
    # depends on the implementation.
    right: Bool[Array, "B T"]


def chunk_length(tokens: int, limit: int) -> int:
    """Returns the number of tokens, up to `limit`, that each device contributes to a chunk.

    The result divides the number of tokens of a row that one device has.
    """
    own = tokens // shard_count("tokens", tokens)
    return next(n for n in range(min(limit, own), 0, -1) if own % n == 0)


def split_chunks(x: Array, chunk: int) -> Array:
    """Splits an array x [B, T, ...] into chunks of C tokens, [number of chunks, B, C, ...].

    If several devices share a row, a chunk has `chunk` tokens from each of them, so that no token
    changes its device.
    """
    batch, tokens = x.shape[:2]
    devices = shard_count("tokens", tokens)
    cut = x.reshape(batch, devices, -1, chunk, *x.shape[2:])
    return jnp.moveaxis(cut, 2, 0).reshape(-1, batch, devices * chunk, *x.shape[2:])


def join_chunks(x: Array, chunk: int) -> Array:
    """Inverts `split_chunks` with the same `chunk`."""
    cut = x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])
    return jnp.moveaxis(cut, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])


def scores_by_chunk(
    score_chunk: Callable[[tuple[Array, Array]], TokenScores],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    chunk: int,
) -> TokenScores:
    """Returns all scores, by calls of `score_chunk` with vectors [B, C, D] and targets [B, C]."""
    pieces = split_chunks(hidden, chunk), split_chunks(targets, chunk)
    return TokenScores(*(join_chunks(x, chunk) for x in jax.lax.map(score_chunk, pieces)))
