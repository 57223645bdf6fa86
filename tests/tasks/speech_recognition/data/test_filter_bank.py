import struct

import numpy as np
import pytest

from brt.config import Speech
from brt.errors import DataError
from brt.tasks.speech_recognition import filter_bank

RATE = 8000


def literal(samples, speech):
    """Computes log mel features by the definition, one frame, frequency and band at a time."""
    window, shift = RATE * filter_bank.WINDOW_MS // 1000, RATE * filter_bank.SHIFT_MS // 1000
    size = 256
    assert size >= window > size // 2
    mels = np.linspace(
        2595 * np.log10(1 + 20 / 700), 2595 * np.log10(1 + RATE / 2 / 700), speech.mel_bands + 2
    )
    rows = []
    for start in range(0, len(samples) - window + 1, shift):
        frame = samples[start : start + window]
        emphasised = [x - 0.97 * (frame[i - 1] if i else frame[0]) for i, x in enumerate(frame)]
        taper = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / (window - 1))
        tapered = np.array(emphasised) * taper
        energies = np.zeros(speech.mel_bands)
        for k in range(size // 2 + 1):
            turn = np.exp(-2j * np.pi * k * np.arange(window) / size)
            power = abs((tapered * turn).sum()) ** 2
            mel = 2595 * np.log10(1 + k * RATE / size / 700)
            for band in range(speech.mel_bands):
                low, middle, high = mels[band : band + 3]
                rising, falling = (mel - low) / (middle - low), (high - mel) / (high - middle)
                energies[band] += power * max(0, min(rising, falling))
        rows.append(np.log(np.maximum(energies, 1e-10)))
    return np.array(rows)


def test_features_equal_the_definition_in_numpy():
    speech = Speech(mel_bands=8)
    samples = np.random.default_rng(0).normal(size=650) * 0.1
    found = filter_bank.log_mel(samples, RATE, speech)
    assert found.shape == (1 + (650 - 200) // 80, 8) and found.dtype == np.float32
    np.testing.assert_allclose(found, literal(samples, speech), rtol=1e-5)


def test_silence_is_finite_and_what_is_too_short_has_no_frame():
    assert (filter_bank.log_mel(np.zeros(400), RATE, Speech()) == np.log(np.float32(1e-10))).all()
    assert filter_bank.log_mel(np.zeros(199), RATE, Speech()).shape == (0, 40)


def test_other_files_are_refused(tmp_path, write_wav):
    path = tmp_path / "a.wav"
    write_wav(path, np.zeros(400), channels=2)
    with pytest.raises(DataError, match="a.wav has 2 channels; convert it"):
        filter_bank.read(path, Speech())
    path.write_bytes(b"RIFF")
    with pytest.raises(DataError, match="a.wav is no wav file of plain samples"):
        filter_bank.read(path, Speech())
    with pytest.raises(DataError, match="b.wav cannot be read: No such file"):
        filter_bank.read(tmp_path / "b.wav", Speech())


def chunk(name, content, size=None):
    """Returns a chunk of a wav file, padded to an even length; `size` is the length it claims."""
    length = len(content) if size is None else size
    return name + struct.pack("<I", length) + content + bytes(len(content) % 2)


def encoded(samples, kind=1, bits=16, before=b"", after=b"", size=None, total=None):
    """Returns a wav file of integers: the bits of each sample, chunks around, and claimed sizes."""
    width = bits // 8
    form = struct.pack("<HHIIHH", kind, 1, RATE, RATE * width, width, bits)
    if kind == 0xFFFE:
        form += struct.pack("<HHI", 22, bits, 4) + bytes.fromhex("0100000000001000800000aa00389b71")
    values = samples + 128 if bits == 8 else samples << (bits - 8)
    data = b"".join((int(v) % 2**bits).to_bytes(width, "little") for v in values)
    body = b"WAVE" + before + chunk(b"fmt ", form) + chunk(b"data", data, size) + after
    return b"RIFF" + struct.pack("<I", len(body) if total is None else total) + body


FORMS = {
    "8 bit": {"bits": 8},
    "24 bit": {"bits": 24},
    "32 bit": {"bits": 32},
    "extensible": {"kind": 0xFFFE},
    "extensible 24 bit": {"kind": 0xFFFE, "bits": 24},
    "chunks around": {"before": chunk(b"LIST", b"odd"), "after": chunk(b"id3 ", b"tag")},
    "piped": {"size": 0xFFFFFFFF, "total": 0xFFFFFFFF},
    "piped by sox": {"size": 0x7FFFFFFF - 8, "total": 0x7FFFFFFF},
    "piped without size": {"size": 0, "total": 0},
}


@pytest.mark.parametrize("form", FORMS)
def test_plain_samples_are_the_same_in_every_form(form, tmp_path):
    samples = np.random.default_rng(1).integers(-128, 128, 1001)
    (tmp_path / "a.wav").write_bytes(encoded(samples, **FORMS[form]))
    found, rate = filter_bank.read(tmp_path / "a.wav", Speech())
    assert rate == RATE
    np.testing.assert_array_equal(found, filter_bank.log_mel(samples / 128, RATE, Speech()))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"kind": 3, "bits": 32}, "floats, not PCM"), ({"kind": 7, "bits": 8}, "mu-law, not PCM"),
     ({"size": 5000}, "ends before the 5,000 bytes"), ({"bits": 64}, "64 bit samples")],
)  # fmt: skip
def test_other_samples_are_named(settings, reason, tmp_path):
    (tmp_path / "a.wav").write_bytes(encoded(np.arange(100), **settings))
    with pytest.raises(DataError, match=rf"a\.wav is no wav file .*{reason}.*convert it"):
        filter_bank.read(tmp_path / "a.wav", Speech())


def test_more_bands_than_frequencies_are_refused():
    with pytest.raises(DataError, match="Speech.mel_bands = 200 are too many for 8000"):
        filter_bank.log_mel(np.zeros(400), RATE, Speech(mel_bands=200))
