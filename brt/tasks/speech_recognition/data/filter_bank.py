"""Computes log-mel features (logarithms of energies in bands of frequencies) of wav files.

In shapes, X is the number of frames, F the number of features (mel bands) of a frame, and N the
number of samples.
"""

import functools
from pathlib import Path

import numpy as np
from jaxtyping import Float

from brt import config
from brt.errors import DataError
from brt.tasks.speech_recognition.data import wav

LOWEST_HZ = 20.0
PRE_EMPHASIS = 0.97
FLOOR = 1e-10  # Smaller energies are replaced by this one, because 0 (silence) has no logarithm.


def read(path: Path, speech: config.Speech) -> tuple[Float[np.ndarray, "X F"], int]:
    """Returns the log-mel features of a wav file, and its sample rate in Hz."""
    samples, rate = wav.read(path)
    return log_mel(samples, rate, speech), rate


def log_mel(
    samples: Float[np.ndarray, " N"], rate: int, speech: config.Speech
) -> Float[np.ndarray, "X F"]:
    """Returns the natural logarithm of the energy in each mel band of each frame.

    There are X = 1 + (N - window) // shift frames, where the window (the length of a frame) and the
    shift from frame to frame are numbers of samples; X is 0 if the sound is shorter than a window.
    A frame is multiplied by a Hann window after pre-emphasis. Bands are triangles, equally spaced
    from 20 Hz to half the sample rate on the mel scale 2595 log10(1 + f / 700). The `samples` are
    in [-1, 1], and the `rate` is their number per second.
    """
    window, shift = (round(rate * ms / 1000) for ms in (speech.window_ms, speech.shift_ms))
    if min(window, shift) < 1:
        raise DataError(
            f"Speech.window_ms = {speech.window_ms} or Speech.shift_ms = {speech.shift_ms} is less "
            f"than a sample at {rate} samples a second"
        )
    if len(samples) < window:
        return np.zeros((0, speech.mel_bands), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(samples, window)[::shift]
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    tapered = (frames - PRE_EMPHASIS * before) * np.hanning(window)
    size = 1 << (window - 1).bit_length()
    power = np.abs(np.fft.rfft(tapered, size)) ** 2
    return np.log(np.maximum(power @ mel_filters(rate, size, speech.mel_bands), FLOOR)).astype(
        np.float32
    )


@functools.cache
def mel_filters(rate: int, size: int, count: int) -> Float[np.ndarray, "frequencies F"]:
    """Returns the weight with which each frequency of a Fourier transform of `size` samples
    contributes to the energy of each mel band. `count` is F, and `rate` is in samples per second.
    """

    def mel(hertz: np.ndarray | float) -> np.ndarray:
        return np.asarray(2595 * np.log10(1 + np.asarray(hertz) / 700))

    edges = np.linspace(mel(LOWEST_HZ), mel(rate / 2), count + 2)
    frequency = mel(np.arange(size // 2 + 1) * rate / size)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (frequency - low) / (middle - low), (high - frequency) / (high - middle)
    weights = np.minimum(rising, falling)
    weights = np.maximum(weights, 0.0)
    if not (weights > 0).any(axis=0).all():
        raise DataError(
            f"Speech.mel_bands = {count} are too many for {rate} samples a second and "
            f"{size} of them in a window: a band would hold no frequency; lower it, or raise "
            "Speech.window_ms"
        )
    return weights
