"""Token scores and cross-entropy loss in plain XLA, one chunk of tokens at a time.

The float32 logits [B, T, V] of a long segment would be the largest array of a train step. Under
differentiation the gradients of each chunk are computed while its logits exist, so nothing is
computed twice.

In shapes, B is the number of rows of the batch, T of tokens of a row, C of tokens of a chunk, D of
numbers of a token's vector, and V of tokens of the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed.rules import constrain
from brt.ops import dispatch
from brt.ops.cross_entropy.chunks import (
    chunk_length,
    join_chunks,
    scores_by_chunk,
    split_chunks,
)
from brt.ops.cross_entropy.scored import TokenScores
from brt.ops.dense import weight_gradient
from brt.ops.layout import transposed
from brt.ops.reductions import sum_leading


class _ChunkLogits(NamedTuple):
    """Float32 logits of a chunk, their log-sum-exp, and the logits of the targets."""

    all: Float[Array, "B C V"]
    lse: Float[Array, "B C"]
    chosen: Float[Array, "B C"]

    @property
    def nats(self) -> Float[Array, "B C"]:
        """The negative log probabilities of the targets, in nats."""
        return self.lse - self.chosen

    def is_target(self, targets: Int[Array, "B C"]) -> Bool[Array, "B C V"]:
        """Returns a mask of the logits: True for the logits of the targets, False for others."""
        return jnp.arange(self.all.shape[-1])[None, None] == targets[..., None]


def _embedding_product(
    embedding: Float[Array, "V D"], dtype: jnp.dtype
) -> Callable[[Array], Array]:
    """Returns a function that multiplies [B, C, D] by the embedding to [B, C, V].

    On CPUs the embedding is transposed once for all chunks; a product with the transpose takes 1.2
    times as long for 1,024 tokens.
    """
    table, sizes = embedding.astype(dtype), "bcd,vd->bcv"
    if dispatch.policy().stores_transposes:
        table, sizes = transposed(table), "bcd,dv->bcv"
    return lambda x: jnp.einsum(sizes, x, table, preferred_element_type=jnp.float32)


def _logits(
    products: Float[Array, "B C V"],
    targets: Int[Array, "B C"],
    bias: Float[Array, " V"] | None,
    scale: float,
) -> _ChunkLogits:
    logits = scale * products
    if bias is not None:
        logits += bias[None, None]
    logits = constrain(logits, "lanes", "tokens", "vocab")
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return _ChunkLogits(logits, lse, chosen)


def token_scores(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    bias: Float[Array, " V"] | None,
    *,
    scale: float,
    chunk: int,
) -> TokenScores:
    """Returns the negative log probability of each target, and whether the target is the most
    probable token.

    The function has no gradients.

    Args:
      hidden: the vectors of the tokens; the logits are scale * hidden @ embedding.T + bias.
      embedding: the embeddings of the vocabulary.
      targets: the token to score at each position.
      bias: a bias of the logits, or None.
      scale: factor of the logits.
      chunk: the largest number of tokens of a row whose logits exist at once on a device.
    """
    chunk, product = (
        chunk_length(hidden.shape[1], chunk),
        _embedding_product(embedding, hidden.dtype),
    )

    def score_chunk(piece: tuple[Array, Array]) -> TokenScores:
        """Returns the scores of the targets of one chunk.

        `piece` has the vectors [B, C, D] and the targets [B, C] of the chunk.
        """
        results = _logits(product(piece[0]), piece[1], bias, scale)
        others = jnp.where(results.is_target(piece[1]), -jnp.inf, results.all)
        return TokenScores(results.nats, results.chosen > jnp.max(others, axis=-1))

    return scores_by_chunk(score_chunk, hidden, targets, chunk)


def cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    bias: Float[Array, " V"] | None,
    *,
    scale: float,
    chunk: int,
    smoothing: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the summed cross-entropy of the targets, with label smoothing and without, as two
    float32 scalars.

    Only the sum with label smoothing has a gradient.

    Args:
      hidden: the vectors of the tokens; the logits are scale * hidden @ embedding.T + bias.
      embedding: the embeddings of the vocabulary.
      targets: the target of each position.
      mask: False where a target does not count.
      bias: a bias of the logits, or None.
      scale: factor of the logits.
      chunk: the largest number of tokens of a row whose logits exist at once on a device.
      smoothing: the fraction of each target's probability that is distributed evenly over all
        tokens.
    """
    return _cross_entropy(hidden, embedding, targets, mask, bias, scale, chunk, smoothing)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _cross_entropy(
    hidden: Array,
    embedding: Array,
    targets: Array,
    mask: Array,
    bias: Array | None,
    scale: float,
    chunk: int,
    smoothing: float,
) -> tuple[Array, Array]:
    chunk, product = (
        chunk_length(hidden.shape[1], chunk),
        _embedding_product(embedding, hidden.dtype),
    )

    def add_chunk(total: Array, piece: tuple[Array, ...]) -> tuple[Array, None]:
        """Adds the sums over the tokens of a chunk to `total`.

        Args:
          total: [2], the sums over the previous chunks: the loss, which has label smoothing, and
            the negative log probabilities of the targets (nats), which have none.
          piece: the vectors, the targets and the mask of the chunk.

        Returns:
          The new sums; and None, because `lax.scan` also expects an output of each step.
        """
        h, target, counts = piece
        results = _logits(product(h), target, bias, scale)
        return total + _sums(results, counts, smoothing), None

    pieces = tuple(split_chunks(x, chunk) for x in (hidden, targets, mask))
    total, _ = jax.lax.scan(add_chunk, jnp.zeros((2,), jnp.float32), pieces)
    return total[0], total[1]


def _sums(results: _ChunkLogits, counts: Array, smoothing: float) -> Float[Array, "2"]:
    """Returns the sum of the loss, with label smoothing, and of the nats, without it."""
    loss = nats = results.nats
    if smoothing:
        loss = (1 - smoothing) * nats + smoothing * (results.lse - jnp.mean(results.all, axis=-1))
    return jnp.stack([jnp.sum(jnp.where(counts, x, 0.0)) for x in (loss, nats)])


def _forward(
    hidden: Array,
    embedding: Array,
    targets: Array,
    mask: Array,
    bias: Array | None,
    scale: float,
    chunk: int,
    smoothing: float,
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array | None]]:
    chunk, product = (
        chunk_length(hidden.shape[1], chunk),
        _embedding_product(embedding, hidden.dtype),
    )

    def add_chunk(carry: tuple, piece: tuple[Array, ...]) -> tuple[tuple, Array]:
        """Returns the scan's carry after a chunk is added, and the gradient of the chunk's vectors.

        Args:
          carry: three sums over the previous chunks: an array of two numbers, the loss, which has
            label smoothing, and the nats, the negative log probabilities of the targets without
            it; the gradient of the embedding; and the gradient of the bias, None without a bias.
          piece: the vectors, the targets and the mask of the chunk.
        """
        total, d_embedding, d_bias = carry
        h, target, counts = piece
        results = _logits(product(h), target, bias, scale)
        probabilities = jnp.exp(results.all - results.lse[..., None])
        smoothed = (1 - smoothing) * results.is_target(target) + smoothing / results.all.shape[-1]
        d_biased = jnp.where(counts[..., None], probabilities - smoothed, 0.0)
        d_logits = (d_biased * scale).astype(h.dtype)
        d_hidden = jnp.einsum("bcv,vd->bcd", d_logits, embedding.astype(h.dtype))
        d_embedding += weight_gradient(d_logits, h).astype(embedding.dtype)
        d_bias = None if d_bias is None else d_bias + sum_leading(d_biased, 2)
        total += _sums(results, counts, smoothing)
        return (total, d_embedding, d_bias), d_hidden

    pieces = tuple(split_chunks(x, chunk) for x in (hidden, targets, mask))
    none = None if bias is None else jnp.zeros_like(bias)
    start = (jnp.zeros((2,), jnp.float32), jnp.zeros_like(embedding), none)
    (total, d_embedding, d_bias), d_hidden = jax.lax.scan(add_chunk, start, pieces)
    return (total[0], total[1]), (join_chunks(d_hidden, chunk), d_embedding, d_bias)


@jax.named_scope("cross_entropy")
def _backward(
    scale: float,
    chunk: int,
    smoothing: float,
    gradients: tuple[Array, Array, Array | None],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, None, None, Array | None]:
    (d_hidden, d_embedding, d_bias), (cotangent, _) = gradients, cotangents
    d_hidden = d_hidden * cotangent.astype(d_hidden.dtype)
    d_bias = None if d_bias is None else d_bias * cotangent
    return d_hidden, d_embedding * cotangent, None, None, d_bias


_cross_entropy.defvjp(_forward, _backward)
