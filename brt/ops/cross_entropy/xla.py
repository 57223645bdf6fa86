"""Token scores and cross-entropy loss in plain XLA, one chunk of C tokens at a time.

The float32 logits of a long segment would be the largest array of a train step. If the loss is
differentiated, the gradients of each chunk are computed while the chunk's logits exist, so nothing
is computed twice.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed.rules import constrain, is_sharded
from brt.ops import dispatch
from brt.ops.cross_entropy.chunks import (
    Targets,
    TokenScores,
    chunk_length,
    join_chunks,
    scores_by_chunk,
    split_chunks,
)
from brt.ops.dense import weight_gradient
from brt.ops.layout import transposed
from brt.ops.reductions import sum_leading
from brt.ops.softmax import soft_capped


class _ChunkLogits(NamedTuple):
    """Float32 logits of a chunk, their log-sum-exp, and the logits of the targets."""

    all: Float[Array, "B C V"]
    lse: Float[Array, "B C"]
    chosen: Float[Array, "B C"]

    @property
    def nats(self) -> Float[Array, "B C"]:
        return self.lse - self.chosen

    def is_target(self, targets: Int[Array, "B C"]) -> Bool[Array, "B C V"]:
        return jnp.arange(self.all.shape[-1])[None, None] == targets[..., None]


def _embedding_product(
    embedding: Float[Array, "V D"], dtype: jnp.dtype, *, rounds: bool
) -> Callable[[Array], Array]:
    """Returns a function that multiplies vectors [B, C, D] with the embedding.

    The products [B, C, V] are float32. If `rounds` is True, the function may round them to `dtype`
    before it converts them to float32.
    """
    table, sizes = embedding.astype(dtype), "bcd,vd->bcv"
    # For 1,024 tokens on CPUs, a product that transposes the table takes 1.2 times as long as a
    # product with this transposed copy.
    if dispatch.policy().stores_transposes:
        table, sizes = transposed(table), "bcd,dv->bcv"
    if rounds and dispatch.policy().rounds_logits and dtype == jnp.bfloat16:
        # Without the barrier, XLA would store the float32 numbers instead of the bfloat16 ones.
        store = jax.lax.optimization_barrier
        return lambda x: store(jnp.einsum(sizes, x, table)).astype(jnp.float32)
    return lambda x: jnp.einsum(sizes, x, table, preferred_element_type=jnp.float32)


def _logits(
    products: Float[Array, "B C V"],
    targets: Int[Array, "B C"],
    bias: Float[Array, " V"] | None,
    scale: float,
    soft_cap: float,
) -> _ChunkLogits:
    logits = soft_capped(scale * products, soft_cap)
    if bias is not None:
        logits += bias[None, None]
    logits = constrain(logits, "lanes", "tokens", "vocab")
    one_pass = dispatch.policy().rounds_logits and not is_sharded("vocab")
    lse = _log_sum_exp(logits) if one_pass else jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return _ChunkLogits(logits, lse, chosen)


def _log_sum_exp(logits: Float[Array, "B C V"]) -> Float[Array, "B C"]:
    """Returns the log-sum-exp over the vocabulary, by one reduction that reads the logits once."""

    def merged(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    start = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0)
    operands = logits, jnp.ones_like(logits)
    top, total = jax.lax.reduce(operands, start, merged, (logits.ndim - 1,))
    return top + jnp.log(total)


def token_scores(
    inputs: Targets, *, scale: float, chunk: int, soft_cap: float = 0.0
) -> TokenScores:
    hidden, embedding, targets, bias, _ = inputs
    chunk = chunk_length(hidden.shape[1], chunk)
    product = _embedding_product(embedding, hidden.dtype, rounds=False)

    def score_chunk(piece: tuple[Array, Array]) -> TokenScores:
        results = _logits(product(piece[0]), piece[1], bias, scale, soft_cap)
        others = jnp.where(results.is_target(piece[1]), -jnp.inf, results.all)
        return TokenScores(results.nats, results.chosen > jnp.max(others, axis=-1))

    return scores_by_chunk(score_chunk, hidden, targets, chunk)


def cross_entropy(
    inputs: Targets, *, scale: float, chunk: int, smoothing: float, soft_cap: float = 0.0
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    chunk = chunk_length(inputs.hidden.shape[1], chunk)
    return _cross_entropy(inputs, scale, soft_cap, chunk, smoothing)


def _pieces(inputs: Targets, chunk: int) -> tuple[Array, ...]:
    return tuple(split_chunks(x, chunk) for x in (inputs.hidden, inputs.targets, inputs.mask))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _cross_entropy(
    inputs: Targets, scale: float, soft_cap: float, chunk: int, smoothing: float
) -> tuple[Array, Array]:
    product = _embedding_product(inputs.embedding, inputs.hidden.dtype, rounds=True)

    def add_chunk(total: Array, piece: tuple[Array, ...]) -> tuple[Array, None]:
        h, target, counts = piece
        results = _logits(product(h), target, inputs.bias, scale, soft_cap)
        return total + _sums(results, counts, smoothing), None

    total, _ = jax.lax.scan(add_chunk, jnp.zeros((2,), jnp.float32), _pieces(inputs, chunk))
    return total[0], total[1]


def _sums(results: _ChunkLogits, counts: Array, smoothing: float) -> Float[Array, "2"]:
    """Returns the sum of the loss, which has label smoothing, and the sum of the nats."""
    loss = nats = results.nats
    if smoothing:
        loss = (1 - smoothing) * nats + smoothing * (results.lse - jnp.mean(results.all, axis=-1))
    return jnp.stack([jnp.sum(jnp.where(counts, x, 0.0)) for x in (loss, nats)])


def _forward(
    inputs: Targets, scale: float, soft_cap: float, chunk: int, smoothing: float
) -> tuple[tuple[Array, Array], Targets]:
    """Returns the two sums and, as the residuals, the gradients of the first sum."""
    embedding, bias = inputs.embedding, inputs.bias
    table = embedding.astype(inputs.hidden.dtype)
    product = _embedding_product(table, inputs.hidden.dtype, rounds=True)

    def add_chunk(carry: tuple, piece: tuple[Array, ...]) -> tuple[tuple, Array]:
        total, d_embedding, d_bias = carry
        h, target, counts = piece
        results = _logits(product(h), target, bias, scale, soft_cap)
        probabilities = jnp.exp(results.all - results.lse[..., None])
        smoothed = (1 - smoothing) * results.is_target(target) + smoothing / results.all.shape[-1]
        d_biased = jnp.where(counts[..., None], probabilities - smoothed, 0.0)
        d_products = d_biased * scale
        if soft_cap:  # The slope of the cap is 1 - (y / cap)^2, where y is the capped logit.
            capped = results.all if bias is None else results.all - bias[None, None]
            d_products *= 1 - jnp.square(capped / soft_cap)
        d_logits = d_products.astype(h.dtype)
        d_hidden = jnp.einsum("bcv,vd->bcd", d_logits, table)
        d_embedding += weight_gradient(d_logits, h).astype(embedding.dtype)
        d_bias = None if d_bias is None else d_bias + sum_leading(d_biased, 2)
        total += _sums(results, counts, smoothing)
        return (total, d_embedding, d_bias), d_hidden

    none = None if bias is None else jnp.zeros_like(bias)
    start = (jnp.zeros((2,), jnp.float32), jnp.zeros_like(embedding), none)
    (total, d_embedding, d_bias), d_hidden = jax.lax.scan(add_chunk, start, _pieces(inputs, chunk))
    gradients = Targets(join_chunks(d_hidden, chunk), d_embedding, None, d_bias)
    return (total[0], total[1]), gradients


@jax.named_scope("cross_entropy")
def _backward(
    scale: float, soft_cap: float, chunk: int, smoothing: float, gradients: Targets,
    cotangents: tuple[Array, Array],
) -> tuple[Targets]:  # fmt: skip
    cotangent, _ = cotangents
    return (jax.tree.map(lambda x: x * cotangent.astype(x.dtype), gradients),)


_cross_entropy.defvjp(_forward, _backward)
