"""Generates texts by sampling, greedy search or beam search, with constraints on the next token.

In shapes, B is the number of sources (inputs of the model, such as documents to summarise), N the
number of texts of each source, L the maximum number of tokens of a text including the start token,
C the number of candidates of a source, and V the number of tokens in the vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Decoding, Sampling
from brt.models.seq2seq import SpecialTokens
from brt.ops.top_k import top_k

Step = Callable[[Array, Any], tuple[Array, Any]]
Reorder = Callable[[Any, Array], Any]


class TextDecoder(NamedTuple):
    """Interface of a model that generates text: pure functions of a decoding state.

    The decoding state is any tree of arrays, in which the model keeps what it needs to know about
    the tokens so far. A beam is a text in progress.
    """

    # Function (tokens int32 [B, N], state) -> (logits of the next tokens [B, N, V], state). Arrays
    # of the state that are the same for all beams of a source, such as the encoded source, are in
    # the state only once for each source.
    step: Step
    # Function (state, beams int32 [B, N]) -> state, in which beam n of source b continues beam
    # beams[b, n]. The function is not called if there is one beam.
    reorder: Reorder
    ids: SpecialTokens  # of the model's vocabulary


class Hypotheses(NamedTuple):
    """N texts of each of B sources, best first. Texts are missing if a search found fewer."""

    sequences: Int[Array, "B N L"]  # from the start token to the end, then padding
    lengths: Int[Array, "B N"]  # number of tokens before the padding; 1 for missing texts
    # Summed log probabilities divided by the length penalty; -inf for missing texts, NaN for all
    # texts of a source whose logits were NaN.
    scores: Float[Array, "B N"]


def length_penalties(decoding: Decoding) -> Float[np.ndarray, " L"]:
    """Returns the length penalty for each number of written tokens, float32 [L].

    Summed log probabilities are divided by the length penalty. Entry n, for a text of n tokens
    without the start token, is n ** `decoding.length_penalty`. Entry 0 is not used.
    """
    written = np.arange(decoding.max_length, dtype=np.float64)
    written[0] = 1
    return (written**decoding.length_penalty).astype(np.float32)


def constrain(
    log_probs: Float[Array, "B N V"],
    sequences: Int[Array, "B N L"],
    length: Int[Array, ""],
    decoding: Decoding,
    ids: SpecialTokens,
) -> Float[Array, "B N V"]:
    """Returns log probabilities that are -inf for banned tokens, without normalising them again.

    Banned and forced tokens are those of Hugging Face's `generate`. If a token is forced, its log
    probability is 0 and the log probability of every other token is -inf, even if the forced token
    is banned. Only the first `length` tokens of `sequences` count.
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
    """Returns True for tokens that would repeat a `size`-gram of the first `length` tokens."""
    batch, beams, total = sequences.shape
    if size > total:
        return jnp.zeros((batch, beams, vocabulary), bool)
    windows = total - size + 1
    # The newest `size - 1` tokens are compared with the beginnings of all n-grams that end at or
    # before the newest token. The n-gram that the next token would complete ends later, so it is
    # not compared with itself.
    same = jnp.broadcast_to(jnp.arange(windows) + size <= length, (batch, beams, windows))
    for i in range(size - 1):
        last = jax.lax.dynamic_index_in_dim(sequences, length - size + 1 + i, axis=-1)
        same &= sequences[..., i : i + windows] == last
    # An n-gram that begins with the newest `size - 1` tokens bans the token at its end. For other
    # n-grams, `ends` has an id beyond the vocabulary, which the scatter below ignores.
    ends = jnp.where(same, sequences[..., size - 1 :], vocabulary)
    rows, columns = jnp.arange(batch)[:, None, None], jnp.arange(beams)[None, :, None]
    banned = jnp.zeros((batch, beams, vocabulary), bool)
    return banned.at[rows, columns, ends].set(True, mode="drop")


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

    The other arguments are those of `search`.
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


def restrict(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Returns logits after temperature, top-k and top-p; excluded tokens have -inf.

    The logits are first shifted so that the largest is 0, and divided by the temperature. Without
    the shift, likely tokens could overflow float32 at low temperatures. Then only the `top_k` most
    likely tokens remain. Of these, only the most likely ones whose probabilities sum to `top_p`
    remain. Tokens that are exactly as likely as the least likely of these remain, too.
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
    """Samples the next token of each text. Temperature 0 selects the most likely token.

    If `key` is an array of keys, one for each text, each text is sampled as if it were alone.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draw = jax.vmap(jax.random.categorical) if key.ndim else jax.random.categorical
    return draw(key, restrict(logits, sampling)).astype(jnp.int32)


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

    The arguments are those of `search`, and the semantics those of Hugging Face's `generate`
    (transformers 5). N hypotheses of each source are running. At every step, each of them is
    continued by one token, and the (1 + E) N most likely continuations are considered, where E is
    the number of tokens that can end a text. Thus at least N of the continuations do not end. A
    continuation that ends becomes a finished hypothesis if it is among the N most likely ones. The
    N finished hypotheses with the best scores are kept. The N most likely continuations that do
    not end become the running hypotheses.
    `Decoding.early_stopping` determines when the search for a source is done.
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
    """Returns the N best of the old finished hypotheses and of the candidates that ended."""
    # Sources that have NaN logits (`broken`) get the scores NaN. Sources that are done keep their
    # old hypotheses.
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

    `scores` are the scores of the finished hypotheses, -inf for missing ones. `best_running` is the
    largest summed log probability of a running hypothesis. Running hypotheses have `written` tokens
    after the start token.
    """
    full = jnp.all(scores > -jnp.inf, axis=-1)
    none_running = best_running == -jnp.inf
    if decoding.early_stopping == "yes":
        return full | none_running
    # The finished hypotheses are compared with the best score that a running hypothesis may reach.
    # This score is computed for the present length. If early_stopping is "never" and the exponent
    # of the penalty is positive, however, it is computed for the maximum length.
    latest = decoding.early_stopping == "never" and decoding.length_penalty > 0
    length = jnp.array(decoding.max_length - 1) if latest else written
    best = best_running / jnp.asarray(penalties)[length]
    return full & (best <= jnp.min(scores, axis=-1)) | none_running


def search(
    decoder: TextDecoder, state: PyTree[Array], *, batch: int, decoding: Decoding
) -> Hypotheses:
    """Generates the best `decoding.beams` texts of each of `batch` sources, with their scores.

    With one beam the search is greedy. `state` is the decoding state of the model before the start
    token, any tree of arrays. The function is pure, and the caller compiles it. Shapes depend on
    `batch` and `decoding` only.
    """
    if decoding.beams == 1:
        return greedy_search(decoder, state, batch=batch, decoding=decoding)
    return beam_search(decoder, state, batch=batch, decoding=decoding)
