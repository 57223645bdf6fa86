"""Features of many utterances in one .npz file."""

import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from brt.errors import DataError
from brt.tasks.speech_recognition.data.utterances import Recording

NEEDED = ("features", "lengths", "ids", "transcripts")


def recordings(path: Path) -> Iterator[Recording]:
    """The utterances of a file, in its order.

    Raises:
      DataError: it is damaged, lacks an array, or its arrays do not fit each other.
    """
    arrays = _arrays(path)
    features, lengths = arrays["features"], arrays["lengths"]
    ends = np.cumsum(lengths)
    sizes = {name: len(arrays[name]) for name in arrays if name != "features"}
    if features.ndim != 2 or len(set(sizes.values())) != 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise DataError(
            f"{path} does not hold features (frames, width) and one length, id and transcript "
            f"of each utterance, but {shapes}"
        )
    if len(lengths) and (lengths.min() < 0 or ends[-1] != len(features)):
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
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in NEEDED if name not in file]
            if not missing:
                return {name: file[name] for name in (*NEEDED, "speakers") if name in file}
            there = ", ".join(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is no .npz file of plain arrays ({error})") from error
    raise DataError(f"{path} has no array {missing[0]!r}; it has {there}")
