"""Computes log-mel features (logarithms of energies in bands of frequencies) of 16-bit wav files.

In shapes, X is the number of frames, F the number of features (mel bands) of a frame, and N the
number of samples.
"""

import functools
import os
import wave
from pathlib import Path

import numpy as np
from jaxtyping import Float

from brt import config, untrusted
from brt.errors import DataError

LOWEST_HZ = 20.0
PRE_EMPHASIS = 0.97
FLOOR = 1e-10  # Smaller energies are replaced by this one, because 0 (silence) has no logarithm.


def read(path: Path, speech: config.Speech) -> tuple[Float[np.ndarray, "X F"], int]:
    """Returns the log-mel features of a wav file, float32 [X, F], and its sample rate in Hz.

    Args:
      path: the file.
      speech: config section with the settings of the features.

    Raises:
      DataError: the file is not a wav file of one channel with 16-bit samples, or its sample rate
        does not fit the settings.
    """
    try:
        with untrusted.open_file(path) as opened, wave.open(opened, "rb") as file:
            channels, width, rate, count = file.getparams()[:4]
            complete = os.fstat(opened.fileno()).st_size >= count * channels * width
            content = file.readframes(count) if complete else b""
            if len(content) != count * channels * width:
                raise EOFError(f"it ends before the {count:,} samples that it says it has")
    # The module `wave` raises RuntimeError if a chunk of the file has an invalid size.
    except (wave.Error, EOFError, RuntimeError) as error:
        reason = str(error) or "it ends too early"
        raise DataError(f"{path} is no wav file of plain samples ({reason})") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if (channels, width) != (1, 2):
        raise DataError(
            f"{path} has {channels} channel(s) of {8 * width} bit samples; convert it to one "
            "channel of 16 bit samples"
        )
    samples = np.frombuffer(content, "<i2").astype(np.float64) / 2**15
    return log_mel(samples, rate, speech), rate


def log_mel(
    samples: Float[np.ndarray, " N"], rate: int, speech: config.Speech
) -> Float[np.ndarray, "X F"]:
    """Returns the natural logarithm of the energy in each mel band of each frame, float32 [X, F].

    There are X = 1 + (N - window) // shift frames, where the window (the length of a frame) and the
    shift from frame to frame are numbers of samples. X is 0 if the sound is shorter than a window.
    A frame is multiplied by a Hann window after pre-emphasis. Bands are triangles, equally spaced
    from 20 Hz to half the sample rate on the mel scale 2595 log10(1 + f / 700).

    Args:
      samples: the sound, N values in [-1, 1].
      rate: samples per second.
      speech: config section with the settings of the features.

    Raises:
      DataError: the sample rate does not fit the settings: the window or the shift is less than one
        sample, or a band contains no frequency.
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
    """Returns the weight with which each frequency of a Fourier transform contributes to the energy
    of each mel band, [frequencies, F].

    Args:
      rate: samples per second.
      size: number of samples that are transformed.
      count: number of bands, F.

    Raises:
      DataError: a band contains no frequency, because there are too many bands.
    """

    def mel(hertz: np.ndarray | float) -> np.ndarray:
        """Converts frequencies (`hertz`, in Hz) to the mel scale."""
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
