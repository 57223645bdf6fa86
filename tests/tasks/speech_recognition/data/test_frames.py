import numpy as np
import pytest

from brt.tasks.speech_recognition import utterances
from brt.tasks.speech_recognition.utterances import Utterance


def test_an_utterance_gets_mean_0_and_deviation_1():
    features = np.random.default_rng(0).normal(3, 5, (40, 4)).astype(np.float32)
    features[:, 2] = 7  # a constant feature
    found = utterances.normalize(features, utterances.moments(features))
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(axis=0), [1, 1, 0, 1], atol=1e-5)


def test_silence_stays_silent():
    silence = np.zeros((5, 3), np.float32)
    assert (utterances.normalize(silence, utterances.moments(silence)) == 0).all()


def test_a_speaker_has_the_moments_of_all_frames():
    rng = np.random.default_rng(1)
    parts = [rng.normal(2, 3, (n, 3)).astype(np.float32) for n in (5, 9, 4)]
    speakers = ["a", "b", "a"]
    found = utterances.speaker_moments(
        Utterance("f", str(i), who, "", x)
        for i, (who, x) in enumerate(zip(speakers, parts, strict=True))
    )
    for who, features in (("a", np.concatenate([parts[0], parts[2]])), ("b", parts[1])):
        np.testing.assert_allclose(found[who].mean, features.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(found[who].deviation, features.std(axis=0), rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7])
@pytest.mark.parametrize(("stack", "stride"), [(1, 1), (3, 1), (1, 2), (2, 3), (4, 3)])
def test_stacking_keeps_every_stride_th_frame_with_those_behind_it(length, stack, stride):
    features = np.arange(1, 2 * length + 1, dtype=np.float32).reshape(length, 2)
    found = utterances.stack_frames(features, stack, stride)
    expected = []
    for start in range(0, length, stride):
        row = [features[start + i] if start + i < length else [0, 0] for i in range(stack)]
        expected.append(np.concatenate(row))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("text", "count"), [("", 0), ("abc", 3), ("aab", 4), ("aaa", 5)])
def test_frames_that_ctc_needs(text, count):
    assert utterances.frames_needed(list(text)) == count
