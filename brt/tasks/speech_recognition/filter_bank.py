"""Computes log-mel features (logarithms of energies in bands of frequencies) of wav files.

The files must contain plain PCM samples, but their header may also be of the extensible form. In
shapes, X is the number of frames, F the number of features (mel bands) of a frame, and N the number
of samples.
"""

import functools
import os
import struct
from io import BufferedReader
from pathlib import Path

import numpy as np
from jaxtyping import Float

from brt import config, untrusted
from brt.errors import DataError

_KINDS = {2: "ADPCM", 3: "floats", 6: "A-law", 7: "mu-law", 0x11: "ADPCM", 0x31: "GSM", 0x55: "MP3"}
_PCM, _EXTENSIBLE = 1, 0xFFFE
# An extensible WAV header names the format by a GUID: the tag of the format and then these bytes.
_SUFFIX = bytes.fromhex("000000001000800000aa00389b71")
# Programs that write a wav file to a pipe do not know the file's size when they write the header.
# In place of the size, they write 0, or a number that is at least this one.
_STREAMED = 0x7FFFF000
_CONVERT = "convert it, for example with `ffmpeg -i IN.wav -ac 1 -c:a pcm_s16le OUT.wav`"
LOWEST_HZ = 20.0
WINDOW_MS, SHIFT_MS = 25, 10  # A frame covers 25 ms, and starts 10 ms after the frame before.
PRE_EMPHASIS = 0.97
FLOOR = 1e-10  # Smaller energies are replaced by this one, because 0 (silence) has no logarithm.


def read_wav(path: Path) -> tuple[Float[np.ndarray, " N"], int]:
    """Returns the samples of a wav file, N values in [-1, 1), and its sample rate in Hz.

    Raises DataError unless the file is complete and has one channel of PCM samples of 8 to 32 bits.
    """
    try:
        with untrusted.open_file(path) as file:
            header, content = _chunks(file)
        channels, width, rate = _format(header)
    except (ValueError, struct.error) as error:
        reason = "it ends too early" if isinstance(error, struct.error) else error
        raise DataError(
            f"{path} is no wav file of plain samples ({reason}); fetch it again, or {_CONVERT}"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if channels != 1:
        raise DataError(f"{path} has {channels} channels; {_CONVERT}")
    samples = np.frombuffer(content, np.uint8)[: len(content) // width * width].reshape(-1, width)
    if width == 1:
        return (samples[:, 0] - 128.0) / 128, rate
    wide = np.zeros((len(samples), 4), np.uint8)
    wide[:, 4 - width :] = samples
    return wide.view("<i4")[:, 0] / 2.0**31, rate


def _chunks(file: BufferedReader) -> tuple[bytes, bytes]:
    """Returns the chunks "fmt " and "data" of a wav file.

    If the header does not say how long the chunk "data" is, it reaches to the end of the file.
    """
    size = os.fstat(file.fileno()).st_size
    name, total, kind = struct.unpack("<4sI4s", file.read(12))
    if (name, kind) != (b"RIFF", b"WAVE"):
        raise ValueError("it does not begin with RIFF and WAVE")
    found: dict[bytes, bytes] = {}
    while not {b"fmt ", b"data"} <= found.keys():
        name, length = struct.unpack("<4sI", file.read(8))
        rest = size - file.tell()
        if name == b"data" and length > rest and length >= _STREAMED:
            length = rest
        if name == b"data" and length == 0 and total in (0, 0xFFFFFFFF):
            length = rest
        if length > rest:
            raise ValueError(f"it ends before the {length:,} bytes that it says it has")
        if name in (b"fmt ", b"data"):
            found[name] = file.read(length)
        else:
            file.seek(length, os.SEEK_CUR)
        file.seek(
            length % 2, os.SEEK_CUR
        )  # A chunk of odd length is followed by a byte of padding.
    return found[b"fmt "], found[b"data"]


def _format(header: bytes) -> tuple[int, int, int]:
    """Returns the number of channels, the number of bytes per sample, and the sample rate."""
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", header[:16])
    if kind == _EXTENSIBLE and header[26:40] == _SUFFIX:
        (kind,) = struct.unpack("<H", header[24:26])
    if kind != _PCM:
        raise ValueError(f"its samples are {_KINDS.get(kind, f'of the kind {kind:#x}')}, not PCM")
    width = (bits + 7) // 8
    if not (1 <= width <= 4 and channels and rate):
        raise ValueError(f"it has {channels} channels of {bits} bit samples, {rate} a second")
    return channels, width, rate


def read(path: Path, speech: config.Speech) -> tuple[Float[np.ndarray, "X F"], int]:
    """Returns the log-mel features of a wav file, and its sample rate in Hz."""
    samples, rate = read_wav(path)
    return log_mel(samples, rate, speech), rate


def log_mel(
    samples: Float[np.ndarray, " N"], rate: int, speech: config.Speech
) -> Float[np.ndarray, "X F"]:
    """Returns the natural logarithm of the energy in each mel band of each frame.

    If a frame has `length` samples, and starts `shift` samples after the frame before, there are
    X = 1 + (N - length) // shift frames; X is 0 if the sound is shorter than a frame. Frames are
    multiplied by a Hann window after pre-emphasis. Bands are triangles, equally spaced from 20 Hz
    to half the sample rate on the mel scale 2595 log10(1 + f / 700). The `samples` are in [-1, 1],
    and the `rate` is their number per second.
    """
    window, shift = (round(rate * ms / 1000) for ms in (WINDOW_MS, SHIFT_MS))
    if shift < 1:
        raise DataError(f"{rate} samples a second are too few for frames of {SHIFT_MS} ms")
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
            f"{size} of them in a window: a band would hold no frequency; lower it"
        )
    return weights
