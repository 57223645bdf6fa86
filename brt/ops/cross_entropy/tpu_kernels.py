"""Bodies of the TPU kernels of token scores and cross-entropy, for one tile of logits.

The forward grid is (rows of tokens, columns of the vocabulary), columns in sequence. Each row has a
running maximum, equal in all lanes, and sums relative to it. The sums are over all tokens of the
vocabulary but the target, so that neither 1 - p nor the gradient is a difference of two nearly
equal numbers. The backward grid has the same tiles transposed, columns x rows, rows in sequence, so
that numbers per token are row vectors.
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
    """Computes the results of the tokens of a tile.

    For each token these are the log-sum-exp of all logits (`lse`), the target's logit (`chosen`),
    the largest other logit (`top`), and the probability of all others (`rest`). If `places` has
    five elements, the first is an output for the probability-weighted mean embedding of the other
    tokens, and the last is scratch memory for it.
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
    hidden: Any, embedding: Any, targets: Any, lse: Any, every: Any, of_target: Any,
    d_embedding: Any, *, scale: float,
) -> None:  # fmt: skip
    """Computes the gradient of the embedding.

    The gradient of a token's logits is `every` times their probabilities, and `of_target` for the
    target.
    """
    columns = len(embedding)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        d_embedding[...] = jnp.zeros_like(d_embedding)

    tile = dot_float32(embedding[...], hidden[...], NT) * scale
    own = targets[...] - pl.program_id(0) * columns
    hit = own == jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    gradient = jnp.where(hit, of_target[...], jnp.exp(tile - lse[...]) * every[...])
    d_embedding[...] += dot_float32(gradient.astype(hidden.dtype), hidden[...], NN)
