"""Which tokens may come next: bans and forced tokens, as in Hugging Face's `generate`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Decoding
from brt.models.targets import SpecialTokens


def constrain(
    log_probs: Float[Array, "B N V"],
    sequences: Int[Array, "B N L"],
    length: Int[Array, ""],
    decoding: Decoding,
    ids: SpecialTokens,
) -> Float[Array, "B N V"]:
    """Log probabilities with -inf for what is banned; what is left is not renormalised.

    Args:
      log_probs: of the next token.
      sequences: what was written so far, the start token included.
      length: how many of their tokens are there, at least 1.

    Returns:
      The same; a forced token costs nothing and leaves no other choice, not even a banned one.
    """
    vocabulary = jnp.arange(log_probs.shape[-1])[None, None]
    if decoding.no_repeat_ngram:
        repeats = repeating(sequences, length, decoding.no_repeat_ngram, vocabulary.size)
        log_probs = jnp.where(repeats, -jnp.inf, log_probs)
    if decoding.min_length:
        too_early = (vocabulary == ids.eos) & (length < decoding.min_length)
        log_probs = jnp.where(too_early, -jnp.inf, log_probs)
    for token, position in ((ids.forced_bos, 1), (ids.forced_eos, decoding.max_length - 1)):
        if token is not None:
            only = jnp.where(vocabulary == token, 0.0, -jnp.inf)
            log_probs = jnp.where(length == position, only, log_probs)
    return log_probs


def repeating(
    sequences: Int[Array, "B N L"], length: Int[Array, ""], size: int, vocabulary: int
) -> Bool[Array, "B N V"]:
    """Tokens that would end an n-gram of `size` tokens which is there already.

    Args:
      sequences: compared are the first `length` tokens, the start token included.
      size: at least 1; 1 bans every token that was used.
    """
    batch, beams, total = sequences.shape
    if size > total:
        return jnp.zeros((batch, beams, vocabulary), bool)
    windows = total - size + 1
    # Windows reach no further than the last token; so the open n-gram is not one of them.
    same = jnp.broadcast_to(jnp.arange(windows) + size <= length, (batch, beams, windows))
    for i in range(size - 1):
        last = jax.lax.dynamic_index_in_dim(sequences, length - size + 1 + i, axis=-1)
        same &= sequences[..., i : i + windows] == last
    ends = jnp.where(same, sequences[..., size - 1 :], vocabulary)  # beyond the last: dropped
    rows, columns = jnp.arange(batch)[:, None, None], jnp.arange(beams)[None, :, None]
    banned = jnp.zeros((batch, beams, vocabulary), bool)
    return banned.at[rows, columns, ends].set(True, mode="drop")
