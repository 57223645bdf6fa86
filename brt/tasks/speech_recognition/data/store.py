"""The utterances of a split on disk.

A store is a directory:

    features.bin    little-endian float32: the frames that a model reads, row after row
    rows.npz        where each row begins there, its tokens, how many frames it had at first;
                    ids, speakers and transcripts as a JSON list in UTF-8
    manifest.json   written last: what the store was made of, what was left out, hashes
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
    """Features and tokens.

    Attributes:
      values: of all frames of a row, one after another.
      targets: int32 ids of each row; none for an empty transcript.
      frames: int64 [rows], before any were joined or dropped.
    """

    values: Ragged
    targets: Ragged
    frames: np.ndarray
    speakers: tuple[str, ...]
    transcripts: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path | str) -> "SpeechStore":
        """Opens a finished store.

        Raises:
          DataError: it is missing, unfinished, of another format, or its sizes do not fit.
        """
        with store.opened(directory, TEXTS, facts=_FACTS) as found:
            values = found.on_disk("features.bin", FLOAT, found.columns["values"], "utterances")
            targets = found.ragged("targets", "target_offsets")
            columns = {name: found.columns[name] for name in (*TEXTS, "frames")}
            found.check("utterances", targets, *columns.values())
            if found.manifest["width"] < 1 or (values.offsets % found.manifest["width"]).any():
                raise ValueError(f"its rows are no frames of {found.manifest['width']} features")
        return cls(
            directory=found.directory, manifest=found.manifest, values=values, targets=targets,
            **columns,
        )  # fmt: skip

    @property
    def written_with(self) -> str:
        return self.manifest["vocabulary"]

    def features(self, row: int | np.integer) -> np.ndarray:
        """float32 [X, width]."""
        return self.values[row].reshape(-1, self.width)

    @property
    def width(self) -> int:
        """Of a frame."""
        return self.manifest["width"]

    @property
    def rate(self) -> int:
        """Samples a second of the wav files; 0 of features, and where nobody wrote it down."""
        return self.manifest.get("rate", 0)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows], frames that a model reads."""
        return self.values.lengths // self.width

    @property
    def seconds(self) -> np.ndarray:
        """float64 [rows]."""
        return self.frames * (self.manifest["shift_ms"] / 1000)

    @property
    def transcript_bytes(self) -> int:
        """Of all transcripts in UTF-8."""
        return sum(len(text.encode()) for text in self.transcripts)


def finish(
    directory: Path,
    offsets: np.ndarray,
    columns: Mapping[str, Sequence[Any]],
    vocabulary: Vocabulary,
    facts: Mapping[str, Any],
) -> SpeechStore:
    """Completes a store whose features are written.

    Args:
      offsets: of the rows in features.bin.
      columns: `ids`, `speakers`, `transcripts`, `frames`.
      facts: for the manifest: `width`, `shift_ms` and what else is worth keeping.
    """
    targets = ragged.joined(
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
