"""Generated speech for tests and examples, which is the same on every machine.

The transcript of an utterance consists of six to eight words from a fixed lexicon of 40 words. A
word has two to four letters, and there are twelve different letters. Neighbouring letters of a word
differ. Each letter sounds like a vowel: two peaks in a spectrum of 20 bands, over three to nine
frames, with a transition to the next letter. A space between words is silent. Each speaker shifts
all peaks up or down, and the shifts of two speakers may differ by more than the distance between
the peaks of different letters. Therefore a single frame does not determine its letter, and the
model needs the rest of the utterance. Speakers also differ in loudness, and noise is added.

In shapes, X is the number of frames, and F = 20 the number of bands.
"""

import hashlib
from collections.abc import Iterator
from functools import partial

import numpy as np
from jaxtyping import Float

from brt.data import generated
from brt.tasks.speech_recognition.utterances import Recording

# The hash of a generated source depends on this number. The number must be increased if the
# generated sound changes, so that data in the cache are prepared again.
VERSION = 1
BANDS = 20
LETTERS = "abcdefghiklm"
WORDS = 40
SPEAKERS = 20  # The utterances of a source are spoken by at most this number of speakers.
NOISE = 0.3


def digest(source: str) -> str:
    """Returns a hash that identifies the content of a source, in place of a file's hash.

    Each utterance depends only on the name of its source, on its index and on `VERSION`. A longer
    source therefore begins with the utterances of a shorter one, and both have the same hash. The
    number of utterances is recorded with the hash, as a part of the source's name.
    """
    return hashlib.sha256(
        f"{generated.PREFIX}{VERSION}:{generated.parse(source).name}".encode()
    ).hexdigest()


def recordings(source: str) -> Iterator[Recording]:
    """Yields the utterances of a source `generated:NAME/COUNT`; NAME determines all of them."""
    name, count = generated.parse(source)
    words = lexicon()
    for number in range(count):
        draw = _random(f"{name}/{number}")
        speaker = f"{name}-{draw.randint(SPEAKERS)}"
        transcript = " ".join(words[i] for i in draw.randint(len(words), size=draw.randint(6, 9)))
        id = f"{name}-{number:05}"
        load = partial(_load, transcript, speaker, id)
        yield Recording(source, id, speaker, transcript, load)


def _load(transcript: str, speaker: str, id: str) -> tuple[np.ndarray, int]:
    return sound(transcript, speaker, id), 0


def lexicon() -> list[str]:
    """Returns the words from which transcripts are composed, all different."""
    draw, words = _random("lexicon"), {}
    while len(words) < WORDS:
        letters = draw.randint(len(LETTERS), size=draw.randint(2, 5))
        if np.diff(letters).all():
            words["".join(LETTERS[i] for i in letters)] = None
    return list(words)


def sound(transcript: str, speaker: str, id: str) -> Float[np.ndarray, "X F"]:
    """Returns the strength of each band in each frame of an utterance.

    The speaker's name determines the shift of the peaks and the loudness, and `id` determines the
    noise and the durations of the letters.
    """
    draw, speaker_draw = _random(f"sound {id}"), _random(f"speaker {speaker}")
    shift, loudness = speaker_draw.uniform(-1.2, 1.2), speaker_draw.uniform(-0.5, 0.5)
    spectra = np.array([_spectrum(letter, shift) for letter in f" {transcript} "])
    frames = draw.randint(3, 10, size=len(spectra))
    frames[[0, -1]] += 4
    middle = np.cumsum(frames) - frames / 2
    time = np.arange(frames.sum())
    clean = [np.interp(time, middle, band) for band in spectra.T]
    noise = NOISE * draw.standard_normal((len(time), BANDS))
    return (np.array(clean).T + loudness + noise).astype(np.float32)


def _spectrum(letter: str, shift: float) -> np.ndarray:
    if letter == " ":
        return np.zeros(BANDS)
    # Each of the twelve letters combines one of three low peaks with one of four high peaks.
    low, high = divmod(LETTERS.index(letter), 4)
    band = np.arange(BANDS)
    peaks = (3.5 + 2 * low + shift, 10.5 + 2 * high + shift)
    first, second = (2 * np.exp(-0.5 * (band - peak) ** 2) for peak in peaks)
    return first + second


def _random(purpose: str) -> np.random.RandomState:
    return generated.draw(f"{VERSION}:{purpose}")
