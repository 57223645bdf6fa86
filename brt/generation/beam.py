"""Beam search with the semantics of Hugging Face's `generate` (transformers 5).

At every step the 2N likeliest continuations of the N running texts are looked at. Those among
the first N that end are finished texts, of which the best N are kept by score; the best N that
do not end run on. A source is done when `Decoding.early_stopping` says so; nothing that other
sources do changes its texts.
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
    """The running and the finished texts of every source.

    Attributes:
      length: int32, tokens of a running text.
      state: the model's, as of `length - 1` tokens read.
      running: int32 [B, N, L], best first.
      log_probs: float32 [B, N], sums; -inf where there is no such text.
      finished: the best so far.
      done: bool [B], the finished texts are final.
    """

    length: Int[Array, ""]
    state: PyTree[Array]
    running: Int[Array, "B N L"]
    log_probs: Float[Array, "B N"]
    finished: Hypotheses
    done: Bool[Array, " B"]


class _Candidates(NamedTuple):
    """Continuations of running texts by one token, likeliest first.

    Attributes:
      beams: int32 [B, C], which text is continued.
      sequences: int32 [B, C, L].
      log_probs: float32 [B, C], sums.
      ended: bool [B, C], by the end token or because no more fit.
    """

    beams: Int[Array, "B C"]
    sequences: Int[Array, "B C L"]
    log_probs: Float[Array, "B C"]
    ended: Bool[Array, "B C"]


def beam_search(
    decoder: TextDecoder, state: PyTree[Array], *, batch: int, decoding: Decoding
) -> Hypotheses:
    """The best `decoding.beams` texts for each source; see `brt.generation.search.search`."""
    penalties = length_penalties(decoding)
    step, reorder, ids = decoder

    def going_on(search: _Search) -> Bool[Array, ""]:
        return (search.length < decoding.max_length) & ~jnp.all(search.done)

    def extend(search: _Search) -> _Search:
        last = jax.lax.dynamic_index_in_dim(search.running, search.length - 1, -1, keepdims=False)
        logits, state = step(last, search.state)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        broken = jnp.isnan(log_probs[..., 0]).any(axis=-1)
        log_probs = constrain(log_probs, search.running, search.length, decoding, ids)
        found = _continued(search, log_probs, decoding, ids)
        finished = _finished(search, found, jnp.asarray(penalties)[search.length], broken)
        # The ended ones come last: what is left of them when too few go on counts as no text.
        goes_on = jnp.where(found.ended, -jnp.inf, found.log_probs)
        log_probs, kept = top_k(goes_on, decoding.beams)
        return _Search(
            length=search.length + 1,
            state=reorder(state, jnp.take_along_axis(found.beams, kept, axis=1)),
            running=jnp.take_along_axis(found.sequences, kept[..., None], axis=1),
            log_probs=log_probs,
            finished=finished,
            done=search.done
            | broken
            | _is_final(finished.scores, log_probs[:, 0], search.length, decoding, penalties),
        )

    search = jax.lax.while_loop(going_on, extend, _start(state, batch, decoding, ids))
    return search.finished


def _start(state: PyTree[Array], batch: int, decoding: Decoding, ids: SpecialTokens) -> _Search:
    """N equal texts, of which one counts."""
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


def _continued(
    search: _Search, log_probs: Float[Array, "B N V"], decoding: Decoding, ids: SpecialTokens
) -> _Candidates:
    """The 2N likeliest continuations."""
    batch, beams, vocabulary = log_probs.shape
    sums = (search.log_probs[..., None] + log_probs).reshape(batch, beams * vocabulary)
    best, indices = top_k(sums, 2 * beams)
    parents, tokens = indices // vocabulary, indices % vocabulary
    sequences = jnp.take_along_axis(search.running, parents[..., None], axis=1)
    sequences = jax.lax.dynamic_update_index_in_dim(sequences, tokens, search.length, -1)
    ended = (tokens == ids.eos) | (search.length + 1 == decoding.max_length)
    return _Candidates(parents, sequences, best, ended)


def _finished(
    search: _Search,
    found: _Candidates,
    penalty: Float[Array, ""],
    broken: Bool[Array, " B"],
) -> Hypotheses:
    """The finished texts with those that just ended; unchanged for sources that are done."""
    old, beams = search.finished, search.log_probs.shape[1]
    counts = found.ended & (jnp.arange(2 * beams) < beams)[None]
    new = Hypotheses(
        sequences=found.sequences,
        lengths=jnp.full(counts.shape, search.length + 1, jnp.int32),
        scores=jnp.where(counts, found.log_probs / penalty, -jnp.inf),
    )
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)
    scores, kept = top_k(both.scores, beams)
    best = Hypotheses(
        sequences=jnp.take_along_axis(both.sequences, kept[..., None], axis=1),
        lengths=jnp.take_along_axis(both.lengths, kept, axis=1),
        scores=jnp.where(broken[:, None], jnp.nan, scores),
    )
    keep = search.done[:, None]
    return Hypotheses(
        jnp.where(keep[..., None], old.sequences, best.sequences),
        *(jnp.where(keep, a, b) for a, b in zip(old[1:], best[1:], strict=True)),
    )


def _is_final(
    scores: Float[Array, "B N"],
    best_running: Float[Array, " B"],
    written: Int[Array, ""],
    decoding: Decoding,
    penalties: Float[np.ndarray, " L"],
) -> Bool[Array, " B"]:
    """Whether no running text is to join the finished ones any more.

    Args:
      scores: of the finished texts, -inf where there is none yet.
      best_running: the largest sum of log probabilities of a running text.
      written: how many tokens it has without the start.
    """
    full = jnp.all(scores > -jnp.inf, axis=-1)
    nothing_runs = best_running == -jnp.inf
    if decoding.early_stopping == "yes":
        return full | nothing_runs
    # A penalty that falls with the length would favour stopping now: the present length is best.
    latest = decoding.early_stopping == "never" and decoding.length_penalty > 0
    length = jnp.array(decoding.max_length - 1) if latest else written
    best = best_running / jnp.asarray(penalties)[length]
    return full & (best <= jnp.min(scores, axis=-1)) | nothing_runs
