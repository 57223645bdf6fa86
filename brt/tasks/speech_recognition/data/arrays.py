"""Reads .npz files with features and transcripts of many utterances.

The array `features` [frames, features] has the frames of all utterances one after another. The
arrays `lengths` (numbers of frames), `ids`, `transcripts` and, optionally, `speakers` have an
element for each utterance.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from brt import untrusted
from brt.errors import DataError
from brt.tasks.speech_recognition.data.utterances import Recording

NEEDED = ("features", "lengths", "ids", "transcripts")
KINDS = {"features": "fiu", "lengths": "iu", "ids": "Uiu", "transcripts": "U", "speakers": "Uiu"}


def recordings(path: Path) -> Iterator[Recording]:
    """Yields the utterances of an .npz file, in the order of its arrays."""
    arrays = _arrays(path)
    features, lengths = arrays["features"], arrays["lengths"]
    count = lengths.shape[:1]
    if features.ndim != 2 or any(x.shape != count for k, x in arrays.items() if k != "features"):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise DataError(
            f"{path} does not hold features (frames, width) and one length, id and transcript "
            f"of each utterance, but {shapes}"
        )
    if len(lengths) and not (0 <= lengths.min() and lengths.max() <= len(features)):
        raise DataError(
            f"a length of {path} is below 0 or above the {len(features):,} frames of its features"
        )
    ends = np.cumsum(lengths.astype(np.int64))
    if len(lengths) and ends[-1] != len(features):
        raise DataError(
            f"the lengths of {path} add up to {ends[-1]:,} frames, its features have "
            f"{len(features):,}"
        )
    speakers = arrays.get("speakers", np.full(len(lengths), ""))
    for i, end in enumerate(ends):
        frames = features[end - lengths[i] : end]
        yield Recording(
            str(path), str(arrays["ids"][i]), str(speakers[i]), str(arrays["transcripts"][i]),
            partial(_load, frames),
        )  # fmt: skip


def _load(frames: np.ndarray) -> tuple[np.ndarray, int]:
    return frames, 0


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with untrusted.npz(path) as file:
            existing = ", ".join(file)
            missing = [name for name in NEEDED if name not in file]
            for name in KINDS.keys() & file.keys():
                if file[name].dtype.kind not in KINDS[name]:
                    raise ValueError(f"{name} is of {file[name].dtype}")
            if not missing:
                return {name: file[name].read() for name in KINDS if name in file}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no .npz file of plain arrays ({error})") from error
    raise DataError(f"{path} has no array {missing[0]!r}; it has {existing}")
