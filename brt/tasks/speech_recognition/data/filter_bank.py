"""Log-mel filter banks of 16 bit wav files."""

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
FLOOR = 1e-10  # of a band's energy: silence is no log of 0


def read(path: Path, speech: config.Speech) -> tuple[Float[np.ndarray, "X F"], int]:
    """The frames of a wav file, and its samples a second.

    Raises:
      DataError: it is no wav file of one channel with 16 bit samples.
    """
    try:
        with untrusted.open_file(path) as opened, wave.open(opened, "rb") as file:
            channels, width, rate, count = file.getparams()[:4]
            there = os.fstat(opened.fileno()).st_size >= count * channels * width
            content = file.readframes(count) if there else b""
            if len(content) != count * channels * width:
                raise EOFError(f"it ends before the {count:,} samples that it says it has")
    except (wave.Error, EOFError, RuntimeError) as error:  # the last: parts of impossible sizes
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
    """log of the energy in `mel_bands` bands, float32; X = 1 + (N - window) // shift, or 0.

    A frame is Hann-windowed after pre-emphasis; bands are triangles, even on the mel scale
    2595 log10(1 + f / 700) from 20 Hz to half the rate.

    Args:
      samples: in [-1, 1].
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
    return np.log(np.maximum(power @ bands(rate, size, speech.mel_bands), FLOOR)).astype(np.float32)


@functools.cache
def bands(rate: int, size: int, count: int) -> Float[np.ndarray, "frequencies F"]:
    """Weights of the bands for each frequency of a Fourier transform.

    Raises:
      DataError: a band holds no frequency.
    """

    def mel(hertz: np.ndarray | float) -> np.ndarray:
        return np.asarray(2595 * np.log10(1 + np.asarray(hertz) / 700))

    edges = np.linspace(mel(LOWEST_HZ), mel(rate / 2), count + 2)
    place = mel(np.arange(size // 2 + 1) * rate / size)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    weights = np.minimum((place - low) / (middle - low), (high - place) / (high - middle))
    weights = np.maximum(weights, 0.0)
    if not (weights > 0).any(axis=0).all():
        raise DataError(
            f"Speech.mel_bands = {count} are too many for {rate} samples a second and "
            f"{size} of them in a window: a band would hold no frequency; lower it, or raise "
            "Speech.window_ms"
        )
    return weights
