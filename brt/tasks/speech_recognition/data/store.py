"""Stores of utterances: the features and transcripts of a split on disk.

A store is a directory with these files:

    features.bin    little-endian float32: the frames that a model reads, utterance after utterance
    rows.npz        for each utterance, its offset in features.bin, the tokens of its transcript,
                    and its number of frames before frames were stacked; ids, speakers and
                    transcripts are JSON lists in UTF-8
    manifest.json   written last: counts, number of features and time shift of the frames,
                    utterances that were left out, hashes

Frames are stacked before they are written: a frame that a model reads consists of one or several
consecutive frames of the utterance (Speech.stack, Speech.stride).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brt.data.rows import ragged, store
from brt.data.rows.ragged import Ragged
from brt.data.rows.store import RowStore
from brt.tasks.speech_recognition.data.vocabulary import Vocabulary

TEXTS = ("ids", "speakers", "transcripts")
FLOAT = np.dtype("<f4")
_FACTS = {
    **dict.fromkeys(("utterances", "tokens", "frames", "width"), int), "shift_ms": float,
    "rate?": int, "vocabulary": str, "rows": {"bad": int},
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeechStore(RowStore):
    """Features and transcripts of utterances; an utterance is a row."""

    values: Ragged  # features of all frames of each row, concatenated, float32 [frames * width]
    targets: Ragged  # token ids of each row's transcript, int32 [T]
    frames: np.ndarray  # int64 [rows], numbers of frames before frames were stacked
    speakers: tuple[str, ...]  # "" if not known
    transcripts: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path | str) -> "SpeechStore":
        with store.opened(directory, TEXTS, facts=_FACTS) as opened:
            values = opened.on_disk("features.bin", FLOAT, opened.columns["values"], "utterances")
            targets = opened.ragged("targets", "target_offsets")
            columns = {name: opened.columns[name] for name in (*TEXTS, "frames")}
            opened.check("utterances", targets, *columns.values())
            width = opened.manifest["width"]
            if width < 1 or (values.offsets % width).any():
                raise ValueError(f"its rows are no frames of {width} features")
        return cls(
            directory=opened.directory, manifest=opened.manifest, values=values, targets=targets,
            **columns,
        )  # fmt: skip

    @property
    def written_with(self) -> str:
        return self.manifest["vocabulary"]

    def features(self, row: int | np.integer) -> np.ndarray:
        """Returns the features of a row, float32 [frames, width]."""
        return self.values[row].reshape(-1, self.width)

    @property
    def width(self) -> int:
        """Number of features of each frame after frames were stacked."""
        return self.manifest["width"]

    @property
    def rate(self) -> int:
        """Sample rate of the wav files in Hz; 0 if it is not known, as for files of features."""
        return self.manifest.get("rate", 0)

    @property
    def lengths(self) -> np.ndarray:
        """Number of frames of each row after frames were stacked, int64 [rows]."""
        return self.values.lengths // self.width

    @property
    def seconds(self) -> np.ndarray:
        """Duration of each utterance, float64 [rows]."""
        return self.frames * (self.manifest["shift_ms"] / 1000)

    @property
    def transcript_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.transcripts)


def finish(
    directory: Path,
    offsets: np.ndarray,
    columns: Mapping[str, Sequence[Any]],
    vocabulary: Vocabulary,
    facts: Mapping[str, Any],
) -> SpeechStore:
    """Completes a store whose features have been written, and returns the opened store.

    Args:
      offsets: int [rows + 1], index in features.bin of the first float32 value of each row,
        followed by the number of all values.
      columns: the columns `ids`, `speakers`, `transcripts` and `frames`, by name.
      facts: further entries of the manifest: `width` (number of features of a stacked frame),
        `rate` (sample rate in Hz), `shift_ms` (time from frame to frame before frames were
        stacked), and `rows` (numbers of all utterances and of utterances that were left out).
    """
    targets = ragged.from_rows(
        [vocabulary.encode(text) for text in columns["transcripts"]], np.dtype(np.int32)
    )
    arrays = {"values": offsets, "targets": targets.values[:], "target_offsets": targets.offsets}
    identity = b"".join(array.astype("<i8").tobytes() for array in arrays.values())
    frames = np.array(columns["frames"], np.int64)
    counts = {
        "vocabulary": vocabulary.fingerprint,
        "utterances": len(targets),
        "tokens": len(targets.values),
        "frames": int(frames.sum()),
    }
    store.finish(
        directory, {**arrays, "frames": frames, **{name: columns[name] for name in TEXTS}},
        {**counts, **facts}, files=("features.bin",),
        identity=vocabulary.fingerprint.encode() + identity,
    )  # fmt: skip
    return SpeechStore.open(directory)
