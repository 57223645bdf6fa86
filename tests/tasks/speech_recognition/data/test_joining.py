import numpy as np
import pytest

from brt.config import Speech
from brt.errors import ConfigError, DataError
from brt.tasks.speech_recognition.utterances import Recording, join_recordings


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
