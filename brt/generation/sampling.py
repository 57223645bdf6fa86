"""Sampling of tokens with temperature, top-k and top-p.

In shapes, B is the number of texts and V the number of tokens in the vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Decoding, Sampling
from brt.generation.decoder import TextDecoder
from brt.generation.greedy import generate_texts
from brt.generation.hypotheses import Hypotheses


def restrict(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Returns logits after temperature, top-k and top-p; excluded tokens have -inf.

    The logits are first shifted so that the largest is 0, and divided by the temperature. Without
    the shift, likely tokens could overflow float32 at low temperatures. Then only the `top_k` most
    likely tokens remain. Of these, only the most likely ones whose probabilities sum to `top_p`
    remain. Tokens that are exactly as likely as the last remaining token remain, too.
    """
    inverse = min(1 / sampling.temperature, float(jnp.finfo(jnp.float32).max))
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) * inverse
    if sampling.top_k:
        best = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0]
        logits = jnp.where(logits < best[:, -1:], -jnp.inf, logits)
    if sampling.top_p < 1.0:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        # A token remains if all more likely tokens together have a probability below top_p. The
        # most likely token always remains.
        last = jnp.sum(mass < sampling.top_p, axis=-1, keepdims=True)
        last = jnp.minimum(last, logits.shape[-1] - 1)
        border = jnp.take_along_axis(ordered, last, axis=-1)
        logits = jnp.where(logits < border, -jnp.inf, logits)
    return logits


def choose(logits: Float[Array, "B V"], key: Array, sampling: Sampling) -> Int[Array, " B"]:
    """Returns the next token of each text, sampled; temperature 0 selects the most likely token."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, restrict(logits, sampling), axis=-1).astype(jnp.int32)


def sample(
    decoder: TextDecoder,
    state: PyTree[Array],
    *,
    batch: int,
    decoding: Decoding,
    sampling: Sampling,
    key: Array,
) -> Hypotheses:
    """Samples one text for each of `batch` sources, which are inputs of the model."""

    def draw(log_probs: Float[Array, "B 1 V"], length: Int[Array, ""]) -> Int[Array, "B 1"]:
        # The number of tokens so far selects the random numbers.
        return choose(log_probs[:, 0], jax.random.fold_in(key, length), sampling)[:, None]

    return generate_texts(decoder, state, draw, batch=batch, decoding=decoding)
