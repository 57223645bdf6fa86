"""Speech that is made up: enough to learn from, and the same on every machine.

An utterance is six to eight words of a fixed lexicon of 40. Words are two to four of twelve
letters, no letter behind itself, and a space lies between two words. Each letter is a vowel-like
sound: two peaks in a spectrum of 20 bands, over three to nine frames, sliding into the next
letter; a space is quiet. Speakers move all peaks up or down, and differ in that by more than
neighbouring letters do; so a frame alone does not tell its letter, but how the rest of the
utterance sounds does. Each has a loudness, too, and noise comes on top.
"""

import hashlib
from collections.abc import Iterator
from functools import partial

import numpy as np
from jaxtyping import Float

from brt.data import generated
from brt.tasks.speech_recognition.data.utterances import Recording

VERSION = 1  # other sounds are another version
BANDS = 20
LETTERS = "abcdefghiklm"
WORDS = 40
SPEAKERS = 20  # of a name
NOISE = 0.3


def digest(source: str) -> str:
    """Tells speech of one name from that of another; more of the same name is the same speech."""
    return hashlib.sha256(
        f"{generated.PREFIX}{VERSION}:{generated.parse(source).name}".encode()
    ).hexdigest()


def recordings(source: str) -> Iterator[Recording]:
    """The utterances; a name always gives the same, and another name others."""
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
    """The words, none twice."""
    draw, words = _random("lexicon"), {}
    while len(words) < WORDS:
        letters = draw.randint(len(LETTERS), size=draw.randint(2, 5))
        if np.diff(letters).all():
            words["".join(LETTERS[i] for i in letters)] = None
    return list(words)


def sound(transcript: str, speaker: str, id: str) -> Float[np.ndarray, "X F"]:
    """float32 [X, 20], what a speaker makes of a transcript; with another id, otherwise."""
    draw, own = _random(f"sound {id}"), _random(f"speaker {speaker}")
    shift, loudness = own.uniform(-1.2, 1.2), own.uniform(-0.5, 0.5)
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
    low, high = divmod(LETTERS.index(letter), 4)  # three places for one peak, four for the other
    band = np.arange(BANDS)
    peaks = (3.5 + 2 * low + shift, 10.5 + 2 * high + shift)
    first, second = (2 * np.exp(-0.5 * (band - peak) ** 2) for peak in peaks)
    return first + second


def _random(purpose: str) -> np.random.RandomState:
    return generated.draw(f"{VERSION}:{purpose}")
