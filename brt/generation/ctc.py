"""Tokens from the frames of an encoder that learned by CTC. The last token is the blank."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

Tokens = tuple[int, ...]
LogProbs = Float[np.ndarray, "X C"]


class Hypothesis(NamedTuple):
    """A sequence of tokens, and the log of its probability."""

    tokens: Tokens
    log_prob: float


def greedy(log_probs: LogProbs) -> Hypothesis:
    """What the likeliest alignment stands for; the probability is that alignment's."""
    best = log_probs.argmax(axis=1)
    return Hypothesis(collapsed(best, log_probs.shape[1] - 1), float(log_probs.max(axis=1).sum()))


def collapsed(alignment: Int[np.ndarray, " X"], blank: int) -> Tokens:
    """Repetitions become one, then blanks go."""
    changes = np.flatnonzero(np.diff(alignment, prepend=-1))
    return tuple(int(i) for i in alignment[changes] if i != blank)


class _Beam(NamedTuple):
    """Prefixes, and how likely the frames so far stand for each.

    Attributes:
      blank: float64 [N], log probability of the alignments that end with a blank.
      token: of those that end with the prefix's last token.
    """

    prefixes: list[Tokens]
    blank: Float[np.ndarray, " N"]
    token: Float[np.ndarray, " N"]


def prefix_beam_search(log_probs: LogProbs, beams: int) -> list[Hypothesis]:
    """The likeliest sequences over all their alignments, best first (Graves, 2012; Hannun, 2014).

    Sums are exact, in float64, as long as no prefix is dropped: with as many beams as there are
    sequences, these are all of them and their probabilities. Equal ones keep their order.

    Args:
      log_probs: of the tokens at each frame.
      beams: prefixes that are kept from frame to frame.
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
    # A token again is a new one only behind a blank.
    longer = total[:, None] + frame[:-1]
    repeats = np.flatnonzero(last >= 0)
    longer[repeats, last[repeats]] = beam.blank[repeats] + frame[last[repeats]]
    place = {prefix: i for i, prefix in enumerate(prefixes)}
    for i, prefix in enumerate(prefixes):  # what grows into a prefix that is there already
        if prefix and (shorter := place.get(prefix[:-1])) is not None:
            stays[i] = np.logaddexp(stays[i], longer[shorter, prefix[-1]])
            longer[shorter, prefix[-1]] = -np.inf
    blank = np.r_[total + frame[-1], np.full(longer.size, -np.inf)]
    token = np.r_[stays, longer.ravel()]
    score = np.logaddexp(blank, token)
    kept = [int(i) for i in np.argsort(-score, kind="stable")[:beams] if score[i] > -np.inf]
    width = longer.shape[1]
    names = [
        prefixes[i] if i < count else (*prefixes[(i - count) // width], (i - count) % width)
        for i in kept
    ]
    return _Beam(names, blank[kept], token[kept])
