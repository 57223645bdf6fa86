"""Constraints on the next token, as in Hugging Face's `generate`: banned and forced tokens.

In shapes, B is the number of sources (inputs of the model, such as documents to summarise), N the
number of hypotheses (unfinished texts) of a source, L the maximum number of tokens of a text, and V
the number of tokens in the vocabulary.
"""

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
    """Returns log probabilities in which banned tokens are -inf; the others are not renormalised.

    If a token is forced, its log probability is 0 and the log probability of every other token is
    -inf, even if the forced token is banned. Only the first `length` tokens of `sequences` count.
    """
    vocabulary = jnp.arange(log_probs.shape[-1])[None, None]
    if decoding.no_repeat_ngram:
        repeats = repeating(sequences, length, decoding.no_repeat_ngram, vocabulary.size)
        log_probs = jnp.where(repeats, -jnp.inf, log_probs)
    if decoding.min_length:
        too_early = jnp.isin(vocabulary, ids.stops) & (length < decoding.min_length)
        log_probs = jnp.where(too_early, -jnp.inf, log_probs)
    for token, position in ((ids.forced_bos, 1), (ids.forced_eos, decoding.max_length - 1)):
        if token is not None:
            only = jnp.where(vocabulary == token, 0.0, -jnp.inf)
            log_probs = jnp.where(length == position, only, log_probs)
    return log_probs


def repeating(
    sequences: Int[Array, "B N L"], length: Int[Array, ""], size: int, vocabulary: int
) -> Bool[Array, "B N V"]:
    """Returns a mask of the tokens that would repeat an n-gram of `size` tokens of the sequence."""
    batch, beams, total = sequences.shape
    if size > total:
        return jnp.zeros((batch, beams, vocabulary), bool)
    windows = total - size + 1
    # The last `size - 1` tokens are compared with the beginnings of all n-grams that end at or
    # before the newest token. The n-gram that the next token would complete ends later, so it is
    # not compared with itself.
    same = jnp.broadcast_to(jnp.arange(windows) + size <= length, (batch, beams, windows))
    for i in range(size - 1):
        last = jax.lax.dynamic_index_in_dim(sequences, length - size + 1 + i, axis=-1)
        same &= sequences[..., i : i + windows] == last
    # Each n-gram that begins with the last `size - 1` tokens bans its last token. For other
    # n-grams, `ends` has an id beyond the vocabulary, which the scatter below ignores.
    ends = jnp.where(same, sequences[..., size - 1 :], vocabulary)
    rows, columns = jnp.arange(batch)[:, None, None], jnp.arange(beams)[None, :, None]
    banned = jnp.zeros((batch, beams, vocabulary), bool)
    return banned.at[rows, columns, ends].set(True, mode="drop")
