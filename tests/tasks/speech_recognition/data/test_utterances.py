import numpy as np
import pytest

from brt.config import Speech
from brt.errors import ConfigError, DataError
from brt.tasks.speech_recognition import utterances
from brt.tasks.speech_recognition.utterances import Recording, Utterance, join_recordings


def test_an_utterance_gets_mean_0_and_deviation_1():
    features = np.random.default_rng(0).normal(3, 5, (40, 4)).astype(np.float32)
    features[:, 2] = 7  # a constant feature
    found = utterances.normalize(features, utterances.moments(features))
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(axis=0), [1, 1, 0, 1], atol=1e-5)


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
@pytest.mark.parametrize("stack", [1, 2, 3, 4])
def test_stacking_joins_neighbours_and_fills_the_last_frame_with_zeros(length, stack):
    features = np.arange(1, 2 * length + 1, dtype=np.float32).reshape(length, 2)
    found = utterances.stack_frames(features, stack)
    expected = []
    for start in range(0, length, stack):
        row = [features[start + i] if start + i < length else [0, 0] for i in range(stack)]
        expected.append(np.concatenate(row))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("text", "count"), [("", 0), ("abc", 3), ("aab", 4), ("aaa", 5)])
def test_frames_that_ctc_needs(text, count):
    assert utterances.frames_needed(list(text)) == count


def recording(number, speaker="", width=2, rate=8000):
    """Returns a recording whose features all have the value `number`."""
    features = np.full((1 + number % 3, width), number, np.float32)
    return Recording("table.tsv", f"r{number}", speaker, f"w{number}", lambda: (features, rate))


def allow(utterance):
    """Accepts every recording, so that any recordings may be joined."""


def test_every_recording_is_heard_once_where_it_is_written_and_by_its_speaker():
    recordings = [recording(n, "ab"[n % 2]) for n in range(23)]
    made = list(join_recordings(recordings, 4, check=allow))
    sizes = sorted(len(one.transcript.split()) for one in made)
    assert sizes == [3, 4, 4, 4, 4, 4]
    heard = []
    for one in made:
        numbers = [int(word[1:]) for word in one.transcript.split()]
        expected = np.concatenate([recordings[n].load()[0] for n in numbers])
        np.testing.assert_array_equal(one.read().features, expected)
        assert {recordings[n].speaker for n in numbers} == {one.speaker}
        heard += numbers
    assert sorted(heard) == list(range(23)) != heard
    assert len({one.id for one in made}) == len(made)
    assert [one.transcript for one in join_recordings(recordings, 4, check=allow)] == [
        one.transcript for one in made
    ]


def test_every_order_has_every_recording_and_is_another_one():
    made = list(join_recordings([recording(n) for n in range(12)], 4, orders=3, check=allow))
    orders = [" ".join(one.transcript for one in made[i : i + 3]).split() for i in (0, 3, 6)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(map(tuple, orders))) == 3 and len({one.id for one in made}) == 9


def test_orders_without_joining_are_refused():
    with pytest.raises(ConfigError, match="Speech.join_orders = 3 .* set Speech.join above 1"):
        Speech(join_orders=3)


@pytest.mark.parametrize("other", [{"width": 3}, {"rate": 16000}])
def test_recordings_of_different_kinds_are_not_joined(other):
    (one,) = join_recordings([recording(0), recording(1, **other)], 2, check=allow)
    with pytest.raises(DataError, match=r"Speech.join cannot put r\d and the 1 after it together"):
        one.load()
