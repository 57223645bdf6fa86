"""Bodies of the TPU kernels of token scores and cross-entropy, for one tile of logits.

The logits have rows (tokens) and columns (entries of the vocabulary). For each group of rows, the
forward kernel processes the tiles of all columns one after the other. For each row, the kernel
keeps a running maximum, which is equal in all lanes of a register, and sums of exponentials
relative to this maximum. The sums are over all entries of the vocabulary except the target.
Otherwise 1 - p, where p is the probability of the target, and the gradient would be differences of
two nearly equal numbers if the target is likely.

For each group of columns, the backward kernel processes the tiles of all rows one after the other.
Its tiles are transposed, columns x rows, so that an array with a number per token is a row vector.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from brt.ops.softmax import MASKED
from brt.ops.tpu import NN, NT, dot_float32


def forward(
    hidden: Any, embedding: Any, targets: Any, lse: Any, chosen: Any, top: Any, rest: Any,
    *places: Any, scale: float,
) -> None:  # fmt: skip
    """Adds the contribution of a tile of logits, of R tokens and C columns of the vocabulary, to
    sums in scratch memory.

    The tile with the first columns of the vocabulary resets the sums beforehand, and the tile with
    the last columns writes the outputs afterwards.

    Args:
      hidden: [R, D], the vectors of the tokens.
      embedding: [C, D], the embeddings of the columns.
      targets: [R, 1], as are the outputs `lse`, `chosen`, `top` and `rest`.
      lse: the log-sum-exp of all logits.
      chosen: the target's logit.
      top: the largest logit of the other tokens of the vocabulary.
      rest: the sum of the probabilities of the other tokens of the vocabulary.
      *places: float32 scratch memory for the largest logits, the sums of exponentials and the
        logits of the targets. If the mean of the other tokens' embeddings, weighted by probability,
        is computed as well, its output comes before these three, and scratch memory for it after
        them.
    """
    mean, highest, others, results, sums = places if len(places) == 5 else (None, *places, None)
    column, lanes = pl.program_id(1), highest.shape[1]
    columns = len(embedding)

    @pl.when(column == 0)
    def _() -> None:
        highest[...] = jnp.full_like(highest, MASKED)
        for x in (others, results, sums):
            if x is not None:
                x[...] = jnp.zeros_like(x)

    tile = dot_float32(hidden[...], embedding[...], NT) * scale
    starts = range(0, columns, lanes)
    own = targets[...] - column * columns
    own = own - jax.lax.broadcasted_iota(jnp.int32, (len(hidden), lanes), 1)
    parts = [(tile[:, i : i + lanes], own == i) for i in starts]
    results[...] += sum(jnp.where(hit, part, 0.0) for part, hit in parts)
    rivals = [jnp.where(hit, MASKED, part) for part, hit in parts]
    before = highest[...]
    row_max = jnp.max(functools.reduce(jnp.maximum, rivals), axis=1, keepdims=True)
    after = jnp.maximum(before, row_max)
    decay, weights = jnp.exp(before - after), [jnp.exp(part - after) for part in rivals]
    highest[...] = after
    others[...] = others[...] * decay + sum(weights)
    if sums is not None:
        weight = jnp.concatenate([part.astype(embedding.dtype) for part in weights], axis=1)
        sums[...] = sums[...] * decay[:, :1] + dot_float32(weight, embedding[...], NN)

    @pl.when(column == pl.num_programs(1) - 1)
    def _() -> None:
        rival = highest[...][:, :1]
        target = jnp.sum(results[...], axis=1, keepdims=True)
        most = jnp.maximum(rival, target)
        others_total = jnp.sum(others[...], axis=1, keepdims=True) * jnp.exp(rival - most)
        total = others_total + jnp.exp(target - most)
        lse[...], chosen[...], top[...] = most + jnp.log(total), target, rival
        rest[...] = others_total / total
        if mean is not None:
            mean[...] = (sums[...] * (jnp.exp(rival - most) / total)).astype(mean.dtype)


def backward(
    hidden: Any, embedding: Any, targets: Any, lse: Any, d_others: Any, d_target: Any,
    d_embedding: Any, *, scale: float,
) -> None:  # fmt: skip
    """Adds the contribution of a tile of logits, of C columns of the vocabulary and R tokens, to
    the gradient of the embedding.

    The tile with the first tokens sets this gradient to zero beforehand. Arrays with a number per
    token are [1, R].

    Args:
      hidden: [R, D], the vectors of the tokens.
      embedding: [C, D], the embeddings of the columns.
      d_others: a factor for each token: the gradient of the product of the token's vector and the
        embedding of an entry other than the target is this factor times the probability of the
        entry. A logit is `scale` times such a product.
      d_target: the gradient of the product of the token's vector and the target's embedding.
      d_embedding: [C, D], float32 output.
    """
    columns = len(embedding)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        d_embedding[...] = jnp.zeros_like(d_embedding)

    tile = dot_float32(embedding[...], hidden[...], NT) * scale
    own = targets[...] - pl.program_id(0) * columns
    hit = own == jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    gradient = jnp.where(hit, d_target[...], jnp.exp(tile - lse[...]) * d_others[...])
    d_embedding[...] += dot_float32(gradient.astype(hidden.dtype), hidden[...], NN)
