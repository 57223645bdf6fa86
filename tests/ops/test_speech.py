import itertools

import jax
import jax.numpy as jnp
import numpy as np

from brt.ops.speech import ctc_nats, spec_augment

FRAMES, TOKENS, LONGEST = 6, 4, 4  # The last of the TOKENS is the blank.
ROWS = [(6, [0, 1]), (6, [1, 1, 2]), (4, [2, 0, 2, 1]), (5, []), (0, [])]


def batch():
    """Returns logits, the mask of valid frames, the texts, and the mask of their tokens."""
    logits = np.random.default_rng(0).normal(size=(len(ROWS), FRAMES, TOKENS))
    valid = np.arange(FRAMES) < np.array([[frames] for frames, _ in ROWS])
    targets = np.zeros((len(ROWS), LONGEST), np.int32)
    scored = np.arange(LONGEST) < np.array([[len(text)] for _, text in ROWS])
    targets[scored] = list(itertools.chain(*(text for _, text in ROWS)))
    return logits.astype(np.float32), valid, targets, scored


def enumerated(logits, text):
    """Returns the nats of a text, from the sum of the probabilities of all alignments, one by
    one.
    """
    blank = TOKENS - 1
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    sum_ = 0.0
    for alignment in itertools.product(range(TOKENS), repeat=len(logits)):
        said = [
            a for a, b in zip(alignment, (blank, *alignment), strict=False) if a not in (b, blank)
        ]
        if said == text:
            sum_ += np.exp(sum(log_probs[i, t] for i, t in enumerate(alignment)))
    return -np.log(sum_)


def test_nats_are_those_of_all_alignments():
    logits, valid, targets, scored = batch()
    found = jax.jit(ctc_nats)(*map(jnp.asarray, (logits, valid, targets, scored)))
    expected = [enumerated(row[:n].astype(np.float64), text)
                for row, (n, text) in zip(logits, ROWS, strict=True)]  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_padding_changes_nothing_and_gets_no_gradient():
    logits, valid, targets, scored = map(jnp.asarray, batch())

    @jax.jit
    def both(logits, targets):
        return jax.value_and_grad(lambda x: ctc_nats(x, valid, targets, scored).sum())(logits)

    nats, gradient = both(logits, targets)
    noise = jnp.where(valid[..., None], logits, 1e4)
    other, same = both(noise, jnp.where(scored, targets, 2))
    assert nats == other and jnp.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient, same)
    assert (np.asarray(gradient)[~np.asarray(valid)] == 0).all()
    # The gradient of a softmax sums to 0 over the tokens of a frame.
    np.testing.assert_allclose(gradient.sum(axis=-1), 0, atol=1e-5)


LENGTHS = np.array([40, 13, 1, 0])
SETTINGS = {"time_masks": (2, 10), "feature_masks": (1, 4)}
augment = jax.jit(spec_augment, static_argnames=SETTINGS)


def masked(key, **changes):
    """Returns a boolean array [rows, frames, features], True where features were masked."""
    features = jnp.ones((4, 40, 12))
    valid = jnp.asarray(np.arange(40) < LENGTHS[:, None])
    return np.asarray(augment(features, valid, jax.random.key(key), **(SETTINGS | changes))) == 0


def test_bands_of_time_and_of_features():
    times, widths = [], []
    for key in range(30):
        found = masked(key)
        for row, length in zip(found, LENGTHS, strict=True):
            time, feature = row.all(axis=1), row.all(axis=0)
            rest = row[~time][:, ~feature]
            assert not rest.any(), "all that is masked is a whole band"
            assert time.sum() <= 2 * min(10, length // 2) and feature.sum() <= 4
            assert not time[length:].any(), "time that is not there is not masked"
            times.append(time.sum())
            widths.append(feature.sum())
    assert len(set(widths)) == 5 and max(times) > 10


def test_rows_and_keys_differ_and_a_key_repeats_itself():
    first = masked(0)
    np.testing.assert_array_equal(first, masked(0))
    assert (first != masked(1)).any() and (first[0] != first[1]).any()


def test_zero_masks_mask_nothing():
    assert not masked(0, time_masks=(0, 0), feature_masks=(0, 0)).any()
    assert not masked(0, time_masks=(0, 0))[:3].all(axis=(2)).any()
