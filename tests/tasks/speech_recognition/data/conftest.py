import struct
import wave

import numpy as np
import pytest


@pytest.fixture
def write_npz(tmp_path):
    """Returns a function that writes a .npz file with random features and returns its path.

    `sizes` are the numbers of frames; `changes` replace arrays of the file, or remove them if None.
    """

    def write(name, transcripts, sizes=None, width=3, seed=0, **changes):
        lengths = np.array(sizes or [20] * len(transcripts))
        arrays = {
            "features": np.random.default_rng(seed).normal(size=(lengths.sum(), width)),
            "lengths": lengths,
            "ids": np.array([f"{name}-{i}" for i in range(len(transcripts))]),
            "transcripts": np.array(transcripts),
            **changes,
        }
        path = tmp_path / f"{name}.npz"
        np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
        return str(path)

    return write


@pytest.fixture
def write_wav():
    """Returns a function that writes samples from -1 to 1 to a .wav file."""

    def write(path, samples, rate=8000, channels=1, width=2):
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(width)
            file.setframerate(rate)
            scaled = np.round(np.asarray(samples) * 32767).astype("<i2")
            file.writeframes(scaled.tobytes() if width == 2 else bytes(len(scaled) * channels))

    return write


@pytest.fixture
def write_ark():
    """Returns a function that writes matrices by id to an archive in Kaldi's binary format.

    The function returns the lines of feats.scp, which say where each matrix is.
    """

    def write(path, matrices, kind=None):
        lines = []
        with open(path, "wb") as file:
            for id, matrix in matrices.items():
                file.write(f"{id} ".encode())
                lines.append(f"{id} {path}:{file.tell()}")
                code = kind or {"float32": b"FM ", "float64": b"DM "}[matrix.dtype.name]
                file.write(b"\0B" + code)
                file.write(struct.pack("<bibi", 4, matrix.shape[0], 4, matrix.shape[1]))
                file.write(matrix.tobytes())
        return lines

    return write
