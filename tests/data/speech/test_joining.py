import numpy as np
import pytest

from brt.data.speech.joining import joined
from brt.data.speech.utterances import Recording
from brt.errors import DataError


def recording(number, speaker="", width=2, rate=8000):
    features = np.full((1 + number % 3, width), number, np.float32)
    return Recording("table.tsv", f"r{number}", speaker, f"w{number}", lambda: (features, rate))


def test_every_recording_is_heard_once_where_it_is_written_and_by_its_speaker():
    recordings = [recording(n, "ab"[n % 2]) for n in range(23)]
    made = list(joined(recordings, 4))
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
    assert [one.transcript for one in joined(recordings, 4)] == [one.transcript for one in made]


@pytest.mark.parametrize("other", [{"width": 3}, {"rate": 16000}])
def test_recordings_of_different_kinds_are_not_joined(other):
    (one,) = joined([recording(0), recording(1, **other)], 2)
    with pytest.raises(DataError, match=r"Speech.join cannot put r\d and the 1 after it together"):
        one.load()
