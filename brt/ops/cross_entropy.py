"""Cross-entropy over a tied embedding, without ever holding all logits.

[B, T, V] float32 logits of a long segment would be the largest array of a training step.
The tokens are cut into chunks; under differentiation each chunk's gradients are computed
while its logits exist, so nothing is computed twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed.rules import count
from brt.ops.dense import weight_gradient
from brt.ops.reductions import sum_leading
from brt.ops.token_logits import Scored, token_logits


def _chunk_length(tokens: int, limit: int) -> int:
    """The largest divisor of a device's share of `tokens` up to `limit`."""
    own = tokens // count("tokens", tokens)
    return next(n for n in range(min(limit, own), 0, -1) if own % n == 0)


def _chunked(x: Array, chunk: int) -> Array:
    """[B, T, ...] -> [count, B, C, ...]: a chunk of each device that shares the tokens.

    Lanes and tokens stay on their device.
    """
    batch, tokens = x.shape[:2]
    devices = count("tokens", tokens)
    cut = x.reshape(batch, devices, -1, chunk, *x.shape[2:])
    return jnp.moveaxis(cut, 2, 0).reshape(-1, batch, devices * chunk, *x.shape[2:])


def _joined(x: Array, chunk: int) -> Array:
    """The inverse of `_chunked`."""
    cut = x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])
    return jnp.moveaxis(cut, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])


def token_nats(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    bias: Float[Array, " V"] | None = None,
    *,
    scale: float,
    chunk: int,
    implementation: str | None = None,
) -> Float[Array, "B T"]:
    """-log p(target) of every token, float32. For evaluation: not made for gradients."""
    chunk = _chunk_length(hidden.shape[1], chunk)

    def nats(piece: tuple[Array, Array]) -> Float[Array, "B C"]:
        return token_logits(
            piece[0], embedding, piece[1], bias, scale=scale, implementation=implementation
        ).nats

    pieces = _chunked(hidden, chunk), _chunked(targets, chunk)
    return _joined(jax.lax.map(nats, pieces), chunk)


def token_guesses(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    scale: float,
    chunk: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """`token_nats`, and whether no token is likelier than the target."""
    chunk = _chunk_length(hidden.shape[1], chunk)

    def guesses(piece: tuple[Array, Array]) -> tuple[Float[Array, "B C"], Bool[Array, "B C"]]:
        found = token_logits(
            piece[0], embedding, piece[1], scale=scale, implementation=implementation
        )
        return found.nats, jnp.argmax(found.logits, axis=-1) == piece[1]

    pieces = _chunked(hidden, chunk), _chunked(targets, chunk)
    nats, right = jax.lax.map(guesses, pieces)
    return _joined(nats, chunk), _joined(right, chunk)


def cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    scale: float,
    chunk: int,
) -> Float[Array, ""]:
    """The summed nats of the scored targets, float32.

    Args:
      hidden: logits are scale * hidden @ embedding.T.
      mask: False where a target does not count.
      chunk: at most so many tokens of a lane have logits at a time.
    """
    return smoothed_cross_entropy(hidden, embedding, targets, mask, scale, chunk, 0.0)[0]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 8))
def smoothed_cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    scale: float,
    chunk: int,
    smoothing: float,
    bias: Float[Array, " V"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`cross_entropy` with smoothed labels (Szegedy et al. 2016, section 7).

    Args:
      smoothing: the share of each target's probability that all tokens divide equally.
      bias: float32, added to the logits behind the scale; None: none.
      implementation: of `token_logits`.

    Returns:
      The summed loss, and the summed nats of the targets alone, which have no gradient.
    """
    chunk = _chunk_length(hidden.shape[1], chunk)

    def body(total: Array, piece: tuple[Array, ...]) -> tuple[Array, None]:
        h, target, counts = piece
        found = token_logits(h, embedding, target, bias, scale=scale, implementation=implementation)
        return total + _sums(found, counts, smoothing), None

    pieces = tuple(_chunked(x, chunk) for x in (hidden, targets, mask))
    total, _ = jax.lax.scan(body, jnp.zeros((2,), jnp.float32), pieces)
    return total[0], total[1]


def _sums(found: Scored, counts: Array, smoothing: float) -> Float[Array, "2"]:
    """Summed loss and nats of a chunk."""
    loss = found.nats
    if smoothing:
        uniform = found.lse - jnp.mean(found.logits, axis=-1)
        loss = (1 - smoothing) * found.nats + smoothing * uniform
    return jnp.stack([jnp.sum(jnp.where(counts, x, 0.0)) for x in (loss, found.nats)])


@jax.named_scope("cross_entropy")
def _forward(
    hidden: Array,
    embedding: Array,
    targets: Array,
    mask: Array,
    scale: float,
    chunk: int,
    smoothing: float,
    bias: Array | None,
    implementation: str | None,
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array | None]]:
    chunk = _chunk_length(hidden.shape[1], chunk)

    def body(carry: tuple, piece: tuple[Array, ...]) -> tuple[tuple, Array]:
        total, d_embedding, d_bias = carry
        h, target, counts = piece
        found = token_logits(h, embedding, target, bias, scale=scale, implementation=implementation)
        logits = found.logits
        probabilities = jnp.exp(logits - found.lse[..., None])
        is_target = jnp.arange(logits.shape[-1])[None, None] == target[..., None]
        wanted = (1 - smoothing) * is_target + smoothing / logits.shape[-1]
        d_biased = jnp.where(counts[..., None], probabilities - wanted, 0.0)
        d_logits = (d_biased * scale).astype(h.dtype)
        d_hidden = jnp.einsum("bcv,vd->bcd", d_logits, embedding.astype(h.dtype))
        d_embedding += weight_gradient(d_logits, h).astype(embedding.dtype)
        d_bias = None if d_bias is None else d_bias + sum_leading(d_biased, 2)
        total += _sums(found, counts, smoothing)
        return (total, d_embedding, d_bias), d_hidden

    pieces = tuple(_chunked(x, chunk) for x in (hidden, targets, mask))
    none = None if bias is None else jnp.zeros_like(bias)
    start = (jnp.zeros((2,), jnp.float32), jnp.zeros_like(embedding), none)
    (total, d_embedding, d_bias), d_hidden = jax.lax.scan(body, start, pieces)
    return (total[0], total[1]), (_joined(d_hidden, chunk), d_embedding, d_bias)


@jax.named_scope("cross_entropy")
def _backward(
    scale: float,
    chunk: int,
    smoothing: float,
    implementation: str | None,
    gradients: tuple[Array, Array, Array | None],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, None, None, Array | None]:
    (d_hidden, d_embedding, d_bias), (cotangent, _) = gradients, cotangents
    d_hidden = d_hidden * cotangent.astype(d_hidden.dtype)
    d_bias = None if d_bias is None else d_bias * cotangent
    return d_hidden, d_embedding * cotangent, None, None, d_bias


smoothed_cross_entropy.defvjp(_forward, _backward)
