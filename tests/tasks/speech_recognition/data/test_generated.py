from itertools import pairwise

import numpy as np
import pytest

from brt.data.generated import parse
from brt.errors import DataError
from brt.tasks.speech_recognition import sources

PINNED = "befg dfc bag befg gl dfc lf ic"
SOUND = [0.09206, 0.04435, 0.30443]


def utterances(source):
    return [recording.read() for recording in sources.generated_recordings(source)]


def test_a_name_always_gives_the_same():
    first, again, more = (utterances(f"generated:x/{n}") for n in (4, 4, 6))
    for a, b in zip(first, again, strict=True):
        assert a._replace(features=None) == b._replace(features=None)
        np.testing.assert_array_equal(a.features, b.features)
    assert [u.transcript for u in more[:4]] == [u.transcript for u in first]
    other = utterances("generated:y/4")
    assert {u.transcript for u in other}.isdisjoint(u.transcript for u in first)
    # The values are fixed, because results on generated speech must stay comparable.
    assert first[0].transcript == PINNED
    np.testing.assert_allclose(first[0].features[0, :3], SOUND, atol=1e-5)


def test_speech_is_what_the_module_says():
    words = sources.lexicon()
    assert len(set(words)) == len(words) == 40
    assert all(a != b for word in words for a, b in pairwise(word))
    for utterance in utterances("generated:z/30"):
        said = utterance.transcript.split()
        assert 6 <= len(said) <= 8 and set(said) <= set(words)
        sounds = len(utterance.transcript) + 2
        assert 3 * sounds + 8 <= len(utterance.features) <= 9 * sounds + 8
        assert utterance.features.shape[1] == sources.BANDS
        assert utterance.speaker.startswith("z-")


def test_letters_of_a_speaker_differ_and_speakers_differ_by_more():
    spectra = np.array([sources._spectrum(letter, 0.0) for letter in sources.LETTERS])
    between = np.abs(spectra[:, None] - spectra).sum(axis=-1)
    assert between[~np.eye(len(spectra), dtype=bool)].min() > 2
    moved = np.array([sources._spectrum(letter, 2.0) for letter in sources.LETTERS])
    confused = np.abs(moved[:, None] - spectra).sum(axis=-1).argmin(axis=1)
    assert (confused != np.arange(len(spectra))).mean() > 0.5


@pytest.mark.parametrize("source", ["generated:", "generated:x", "generated:x/0", "generated:x/-1"])
def test_other_names_are_refused(source):
    with pytest.raises(DataError, match="must be generated:NAME/COUNT"):
        parse(source)
