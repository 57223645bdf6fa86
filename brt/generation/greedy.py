"""Generates one text for each source, token by token, such as by greedy search.

In shapes, B is the number of sources (inputs of the model, such as documents to summarise), L the
maximum number of tokens of a text including the start token, and V the number of tokens in the
vocabulary. The number of texts of each source, N in `Hypotheses`, is 1.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Decoding
from brt.generation.constraints import constrain
from brt.generation.decoder import TextDecoder
from brt.generation.hypotheses import Hypotheses, length_penalties


class _Text(NamedTuple):
    """One text for each source."""

    length: Int[Array, ""]  # number of tokens of the texts that are not done
    state: PyTree[Array]  # state of the model after `length - 1` tokens
    sequences: Int[Array, "B 1 L"]
    lengths: Int[Array, "B 1"]
    log_probs: Float[Array, "B 1"]  # summed log probabilities
    done: Bool[Array, "B 1"]


# A function of this type takes the log probabilities [B, 1, V] of the next tokens and the number of
# tokens so far, and returns the chosen tokens [B, 1].
Choose = Callable[[Array, Array], Array]


def greedy_search(
    decoder: TextDecoder, state: PyTree[Array], *, batch: int, decoding: Decoding
) -> Hypotheses:
    """Generates one text for each source, with the most likely token at every step."""

    def likeliest(log_probs: Float[Array, "B 1 V"], length: Int[Array, ""]) -> Int[Array, "B 1"]:
        return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)

    return generate_texts(decoder, state, likeliest, batch=batch, decoding=decoding)


def generate_texts(
    decoder: TextDecoder, state: PyTree[Array], choose: Choose, *, batch: int, decoding: Decoding
) -> Hypotheses:
    """Generates one text for each source, token by token, where `choose` selects the tokens.

    The other arguments are those of `brt.generation.search.search`.
    """
    step, _, ids = decoder

    def unfinished(text: _Text) -> Bool[Array, ""]:
        return (text.length < decoding.max_length) & ~jnp.all(text.done)

    def extend(text: _Text) -> _Text:
        last = jax.lax.dynamic_index_in_dim(text.sequences, text.length - 1, -1, keepdims=False)
        logits, state = step(last, text.state)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        broken = jnp.isnan(log_probs[..., 0])
        log_probs = constrain(log_probs, text.sequences, text.length, decoding, ids)
        token = choose(log_probs, text.length)
        gain = jnp.take_along_axis(log_probs, token[..., None], axis=-1)[..., 0]
        gain = jnp.where(broken, jnp.nan, gain)
        next_token = jnp.where(text.done, ids.pad, token)
        sequences = jax.lax.dynamic_update_index_in_dim(text.sequences, next_token, text.length, -1)
        return _Text(
            length=text.length + 1,
            state=state,
            sequences=sequences,
            lengths=text.lengths + ~text.done,
            log_probs=text.log_probs + jnp.where(text.done, 0.0, gain),
            done=text.done | jnp.isin(token, ids.stops) | broken,
        )

    sequences = jnp.full((batch, 1, decoding.max_length), ids.pad, jnp.int32)
    first = _Text(
        length=jnp.array(1, jnp.int32),
        state=state,
        sequences=sequences.at[..., 0].set(ids.start),
        lengths=jnp.ones((batch, 1), jnp.int32),
        log_probs=jnp.zeros((batch, 1), jnp.float32),
        done=jnp.zeros((batch, 1), bool),
    )
    text = jax.lax.while_loop(unfinished, extend, first)
    penalties = jnp.asarray(length_penalties(decoding))
    return Hypotheses(text.sequences, text.lengths, text.log_probs / penalties[text.lengths - 1])
