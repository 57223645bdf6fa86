"""CTC decoding: finds token sequences, given log probabilities of tokens at each frame of an input.

CTC assigns a token or a blank to each frame. Such an assignment is called an alignment, and its
text is obtained by merging repeated tokens and removing blanks. In shapes, X is the number of
frames and C the number of tokens. The last of the C tokens is the blank.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

Tokens = tuple[int, ...]
LogProbs = Float[np.ndarray, "X C"]


class Hypothesis(NamedTuple):
    """A sequence of token ids without blanks, and its log probability (natural logarithm)."""

    tokens: Tokens
    log_prob: float


def greedy(log_probs: LogProbs) -> Hypothesis:
    """Returns the tokens of the most likely alignment, and the alignment's log probability."""
    best = log_probs.argmax(axis=1)
    return Hypothesis(collapse(best, log_probs.shape[1] - 1), float(log_probs.max(axis=1).sum()))


def collapse(alignment: Int[np.ndarray, " X"], blank: int) -> Tokens:
    """Returns the tokens of an alignment: repeated tokens are merged, then blanks are removed."""
    changes = np.flatnonzero(np.diff(alignment, prepend=-1))
    return tuple(int(i) for i in alignment[changes] if i != blank)


class _Beam(NamedTuple):
    """N prefixes, and the log probabilities (float64) of their alignments to the frames so far."""

    prefixes: list[Tokens]  # the token sequences
    blank: Float[np.ndarray, " N"]  # log probability of the alignments that end with a blank
    # Log probability of the alignments that end with the last token of the prefix.
    token: Float[np.ndarray, " N"]


def prefix_beam_search(log_probs: LogProbs, beams: int) -> list[Hypothesis]:
    """Returns the most likely token sequences, best first.

    The probability of a sequence is the sum of the probabilities of all its alignments to the
    frames. The algorithm is the prefix search by Graves (2012) and Hannun (2014). It is computed in
    float64, and keeps `beams` prefixes from frame to frame. The result is exact if `beams` is at
    least the number of possible sequences.
    """
    beam = _Beam([()], np.zeros(1), np.full(1, -np.inf))
    for frame in log_probs.astype(np.float64):
        beam = _step(beam, frame, beams)
    total = np.logaddexp(beam.blank, beam.token)
    order = np.argsort(-total, kind="stable")
    return [Hypothesis(beam.prefixes[i], float(total[i])) for i in order]


def _step(beam: _Beam, frame: Float[np.ndarray, " C"], beams: int) -> _Beam:
    prefixes, count = beam.prefixes, len(beam.prefixes)
    total = np.logaddexp(beam.blank, beam.token)
    last = np.array([prefix[-1] if prefix else -1 for prefix in prefixes])
    stays = np.where(last >= 0, beam.token + frame[last], -np.inf)
    # If a prefix is extended by a token that equals its last token, a blank must separate the two.
    # Without the blank, the two tokens would be merged.
    longer = total[:, None] + frame[:-1]
    repeats = np.flatnonzero(last >= 0)
    longer[repeats, last[repeats]] = beam.blank[repeats] + frame[last[repeats]]
    index = {prefix: i for i, prefix in enumerate(prefixes)}
    # If an extension equals another prefix of the beam, their probabilities are added.
    for i, prefix in enumerate(prefixes):
        if prefix and (shorter := index.get(prefix[:-1])) is not None:
            stays[i] = np.logaddexp(stays[i], longer[shorter, prefix[-1]])
            longer[shorter, prefix[-1]] = -np.inf
    blank = np.r_[total + frame[-1], np.full(longer.size, -np.inf)]
    token = np.r_[stays, longer.ravel()]
    score = np.logaddexp(blank, token)
    best = [int(i) for i in np.argsort(-score, kind="stable")[:beams] if score[i] > -np.inf]
    width = longer.shape[1]
    names = [
        prefixes[i] if i < count else (*prefixes[(i - count) // width], (i - count) % width)
        for i in best
    ]
    return _Beam(names, blank[best], token[best])
