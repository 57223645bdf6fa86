import itertools
from collections import defaultdict

import numpy as np
import pytest

from brt.generation import ctc


def log_probs(rng, frames, tokens, sharpness=1.5):
    """Returns random log probabilities, [frames, tokens]."""
    logits = sharpness * rng.normal(size=(frames, tokens))
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def enumerated(found):
    """Returns the probability of every sequence as a sum over all alignments, one by one."""
    frames, tokens = found.shape
    blank, sums = tokens - 1, defaultdict(float)
    for alignment in itertools.product(range(tokens), repeat=frames):
        sequence, before = [], None
        for token in alignment:
            if token != before and token != blank:
                sequence.append(token)
            before = token
        sums[tuple(sequence)] += np.exp(sum(found[i, t] for i, t in enumerate(alignment)))
    return sums


@pytest.mark.parametrize(("frames", "tokens"), [(1, 3), (4, 2), (5, 3), (4, 4), (7, 3)])
def test_all_beams_give_every_sequence_its_probability(frames, tokens):
    rng = np.random.default_rng(frames)
    for _ in range(3):
        found = log_probs(rng, frames, tokens)
        expected = enumerated(found)
        beams = ctc.prefix_beam_search(found, 10_000)
        assert {b.tokens for b in beams} == set(expected)
        for beam in beams:
            np.testing.assert_allclose(np.exp(beam.log_prob), expected[beam.tokens], rtol=1e-12)
        scores = [b.log_prob for b in beams]
        assert scores == sorted(scores, reverse=True)
        np.testing.assert_allclose(sum(np.exp(scores)), 1, rtol=1e-12)


def test_fewer_beams_find_the_best_and_never_say_too_much():
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(20):
        found = log_probs(rng, 6, 3)
        expected = enumerated(found)
        beams = ctc.prefix_beam_search(found, 4)
        assert len(beams) == 4
        assert all(np.exp(b.log_prob) <= expected[b.tokens] * (1 + 1e-9) for b in beams)
        hits += beams[0].tokens == max(expected, key=expected.get)
    assert hits >= 18


def test_the_sum_of_alignments_beats_the_best_one():
    """Graves (2012, figure 7.2): the best alignment is empty, but one token is likelier in sum."""
    found = np.log(np.array([[0.4, 0.6], [0.4, 0.6]]))
    assert ctc.greedy(found) == ((), pytest.approx(np.log(0.36)))
    best = ctc.prefix_beam_search(found, 2)[0]
    assert best == ((0,), pytest.approx(np.log(0.64)))


def test_greedy_is_the_likeliest_alignment():
    rng = np.random.default_rng(1)
    for _ in range(10):
        found = log_probs(rng, 6, 3)
        alignment = max(
            itertools.product(range(3), repeat=6),
            key=lambda a: sum(found[i, t] for i, t in enumerate(a)),
        )
        assert ctc.greedy(found).tokens == ctc.collapse(np.array(alignment), 2)


@pytest.mark.parametrize(
    ("alignment", "tokens"),
    [
        ([2, 2, 2], ()), ([0, 0, 2, 0], (0, 0)), ([0, 1, 1, 0], (0, 1, 0)), ([2, 1, 2], (1,)),
        ([0, 2, 2, 0, 0], (0, 0)), ([], ()),
    ],
)  # fmt: skip
def test_repetitions_collapse_and_blanks_go(alignment, tokens):
    assert ctc.collapse(np.array(alignment, int), 2) == tokens


def test_impossible_tokens_are_never_written():
    with np.errstate(divide="ignore"):
        found = np.log(np.array([[0.5, 0.0, 0.5], [0.25, 0.0, 0.75], [1.0, 0.0, 0.0]]))
    beams = ctc.prefix_beam_search(found, 10)
    assert {b.tokens for b in beams} == {(0,), (0, 0)}
    np.testing.assert_allclose(sum(np.exp(b.log_prob) for b in beams), 1)


def test_a_frame_less_utterance_says_nothing():
    nothing = np.zeros((0, 3))
    assert ctc.greedy(nothing) == ((), 0.0)
    assert ctc.prefix_beam_search(nothing, 3) == [((), 0.0)]
