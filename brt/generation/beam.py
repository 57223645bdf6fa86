"""Beam search with the semantics of Hugging Face's `generate` (transformers 5).

For each source (the input of the model, such as a document to summarise), N hypotheses are running.
At every step, each of them is continued by one token, and the 2N most likely continuations are
considered, or (1 + E) N if E tokens can end a text, so that N of them do not end. A continuation
that ends becomes a finished hypothesis if it is among the first N, and the N finished hypotheses
with the best scores are kept. The best N continuations that do not end become the running
hypotheses. `Decoding.early_stopping` determines when the search for a source is done.

In shapes, B is the number of sources, L the maximum number of tokens of a text including the start
token, C the number of candidates of a source, and V the number of tokens in the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Decoding
from brt.generation.constraints import constrain
from brt.generation.decoder import TextDecoder
from brt.generation.hypotheses import Hypotheses, length_penalties
from brt.models.targets import SpecialTokens
from brt.ops.top_k import top_k


class _Search(NamedTuple):
    """Running and finished hypotheses of every source."""

    length: Int[Array, ""]  # number of tokens of the running hypotheses
    state: PyTree[Array]  # state of the model after `length - 1` tokens
    running: Int[Array, "B N L"]  # best first
    # Summed log probabilities; -inf if there are fewer than N running hypotheses.
    log_probs: Float[Array, "B N"]
    finished: Hypotheses  # the best finished hypotheses so far
    done: Bool[Array, " B"]  # True if the search for the source has ended


class _Candidates(NamedTuple):
    """Continuations of running hypotheses by one token, most likely first."""

    beams: Int[Array, "B C"]  # index of the hypothesis that is continued
    sequences: Int[Array, "B C L"]
    log_probs: Float[Array, "B C"]  # summed log probabilities
    ended: Bool[Array, "B C"]  # True after the end token or at the maximum length


def beam_search(
    decoder: TextDecoder, state: PyTree[Array], *, batch: int, decoding: Decoding
) -> Hypotheses:
    """Returns the best N texts of each source, where N is `decoding.beams`.

    The arguments are those of `brt.generation.search.search`.
    """
    penalties = length_penalties(decoding)
    step, reorder, ids = decoder

    def unfinished(search: _Search) -> Bool[Array, ""]:
        return (search.length < decoding.max_length) & ~jnp.all(search.done)

    def extend(search: _Search) -> _Search:
        last = jax.lax.dynamic_index_in_dim(search.running, search.length - 1, -1, keepdims=False)
        logits, state = step(last, search.state)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        broken = jnp.isnan(log_probs[..., 0]).any(axis=-1)
        log_probs = constrain(log_probs, search.running, search.length, decoding, ids)
        candidates = _continue(search, log_probs, decoding, ids)
        penalty = jnp.asarray(penalties)[search.length]
        finished = _update_finished(search, candidates, penalty, broken)
        # Candidates that ended get the score -inf, so that they do not become running hypotheses.
        # If fewer than N candidates are left, top_k also selects some with the score -inf. Running
        # hypotheses with this score count as missing.
        scores = jnp.where(candidates.ended, -jnp.inf, candidates.log_probs)
        log_probs, chosen = top_k(scores, decoding.beams)
        return _Search(
            length=search.length + 1,
            state=reorder(state, jnp.take_along_axis(candidates.beams, chosen, axis=1)),
            running=jnp.take_along_axis(candidates.sequences, chosen[..., None], axis=1),
            log_probs=log_probs,
            finished=finished,
            done=search.done
            | broken
            | _is_final(finished.scores, log_probs[:, 0], search.length, decoding, penalties),
        )

    search = jax.lax.while_loop(unfinished, extend, _start(state, batch, decoding, ids))
    return search.finished


def _start(state: PyTree[Array], batch: int, decoding: Decoding, ids: SpecialTokens) -> _Search:
    """Returns the search before the first step."""
    # Each source has one running hypothesis, the start token; the other N - 1 count as missing.
    shape = (batch, decoding.beams)
    sequences = jnp.full((*shape, decoding.max_length), ids.pad, jnp.int32)
    sequences = sequences.at[..., 0].set(ids.start)
    none = jnp.full(shape, -jnp.inf, jnp.float32)
    return _Search(
        length=jnp.array(1, jnp.int32),
        state=state,
        running=sequences,
        log_probs=none.at[:, 0].set(0.0),
        finished=Hypotheses(sequences, jnp.ones(shape, jnp.int32), none),
        done=jnp.zeros((batch,), bool),
    )


def _continue(
    search: _Search, log_probs: Float[Array, "B N V"], decoding: Decoding, ids: SpecialTokens
) -> _Candidates:
    """Returns the C most likely continuations of each source."""
    batch, beams, vocabulary = log_probs.shape
    sums = (search.log_probs[..., None] + log_probs).reshape(batch, beams * vocabulary)
    best, indices = top_k(sums, min((1 + len(ids.stops)) * beams, beams * vocabulary))
    parents, tokens = indices // vocabulary, indices % vocabulary
    sequences = jnp.take_along_axis(search.running, parents[..., None], axis=1)
    sequences = jax.lax.dynamic_update_index_in_dim(sequences, tokens, search.length, -1)
    ended = jnp.isin(tokens, ids.stops) | (search.length + 1 == decoding.max_length)
    return _Candidates(parents, sequences, best, ended)


def _update_finished(
    search: _Search,
    candidates: _Candidates,
    penalty: Float[Array, ""],
    broken: Bool[Array, " B"],
) -> Hypotheses:
    """Merges candidates that ended into the finished hypotheses of sources that are not done."""
    # `broken` is True for sources whose logits are NaN; their scores become NaN.
    old, beams = search.finished, search.log_probs.shape[1]
    counts = candidates.ended & (jnp.arange(candidates.ended.shape[1]) < beams)[None]
    new = Hypotheses(
        sequences=candidates.sequences,
        lengths=jnp.full(counts.shape, search.length + 1, jnp.int32),
        scores=jnp.where(counts, candidates.log_probs / penalty, -jnp.inf),
    )
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)
    scores, chosen = top_k(both.scores, beams)
    best = Hypotheses(
        sequences=jnp.take_along_axis(both.sequences, chosen[..., None], axis=1),
        lengths=jnp.take_along_axis(both.lengths, chosen, axis=1),
        scores=jnp.where(broken[:, None], jnp.nan, scores),
    )
    done = search.done[:, None]
    return Hypotheses(
        jnp.where(done[..., None], old.sequences, best.sequences),
        *(jnp.where(done, a, b) for a, b in zip(old[1:], best[1:], strict=True)),
    )


def _is_final(
    scores: Float[Array, "B N"],
    best_running: Float[Array, " B"],
    written: Int[Array, ""],
    decoding: Decoding,
    penalties: Float[np.ndarray, " L"],
) -> Bool[Array, " B"]:
    """Returns True for sources whose finished hypotheses cannot be improved by running ones.

    `scores` are those of the finished hypotheses, -inf for missing ones; `best_running` is the
    largest summed log probability of a running one, which has `written` tokens after the start
    token.
    """
    full = jnp.all(scores > -jnp.inf, axis=-1)
    none_running = best_running == -jnp.inf
    if decoding.early_stopping == "yes":
        return full | none_running
    # The finished hypotheses are compared with the best score that a running hypothesis may reach.
    # With early_stopping = "never" and a positive penalty exponent, a hypothesis would reach this
    # score at the maximum length. Otherwise the score at the present length is used.
    latest = decoding.early_stopping == "never" and decoding.length_penalty > 0
    length = jnp.array(decoding.max_length - 1) if latest else written
    best = best_running / jnp.asarray(penalties)[length]
    return full & (best <= jnp.min(scores, axis=-1)) | none_running
