"""The utterances of a split on disk.

A store is a directory:

    features.bin    little-endian float32: the frames that a model reads, row after row
    rows.npz        where each row begins there, its tokens, how many frames it had at first;
                    ids, speakers and transcripts as a JSON list in UTF-8
    manifest.json   written last: what the store was made of, what was left out, hashes
"""

import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brt.data import manifests, sources
from brt.data.pairs import ragged
from brt.data.pairs.ragged import Ragged
from brt.data.speech.vocabulary import Vocabulary
from brt.errors import DataError

TEXTS = ("ids", "speakers", "transcripts")
FLOAT = np.dtype("<f4")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeechStore:
    """Features and tokens.

    Attributes:
      values: of all frames of a row, one after another.
      targets: int32 ids of each row; none for an empty transcript.
      frames: int64 [rows], before any were joined or dropped.
    """

    directory: Path
    manifest: Mapping[str, Any]
    values: Ragged
    targets: Ragged
    frames: np.ndarray
    ids: tuple[str, ...]
    speakers: tuple[str, ...]
    transcripts: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path | str) -> "SpeechStore":
        """Opens a finished store.

        Raises:
          DataError: it is missing, unfinished, of another format, or its sizes do not fit.
        """
        directory = Path(directory)
        manifest = manifests.read(directory / "manifest.json")
        try:
            with np.load(directory / "rows.npz", allow_pickle=False) as arrays:
                values = ragged.read(directory / "features.bin", FLOAT, arrays["values"])
                targets = Ragged(arrays["targets"], arrays["target_offsets"])
                frames = arrays["frames"]
                texts = {name: tuple(json.loads(arrays[name].tobytes())) for name in TEXTS}
            if {manifest["utterances"]} != {len(values), len(targets), *map(len, texts.values())}:
                raise ValueError("rows.npz has another length than its manifest says")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"the store {directory} is damaged ({error}); delete it and prepare it again"
            ) from error
        return cls(
            directory=directory, manifest=manifest, values=values, targets=targets, frames=frames,
            **texts,
        )  # fmt: skip

    def __len__(self) -> int:
        """How many utterances."""
        return len(self.ids)

    def features(self, row: int | np.integer) -> np.ndarray:
        """float32 [X, width], a view."""
        return self.values[row].reshape(-1, self.width)

    @property
    def fingerprint(self) -> str:
        """sha256 of features, tokens and vocabulary."""
        return self.manifest["fingerprint"]

    @property
    def width(self) -> int:
        """Of a frame."""
        return self.manifest["width"]

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
    columns: Mapping[str, list[Any]],
    vocabulary: Vocabulary,
    facts: Mapping[str, Any],
) -> SpeechStore:
    """Completes a store whose features are written.

    Args:
      offsets: of the rows in features.bin.
      columns: `ids`, `speakers`, `transcripts`, `frames`.
      facts: for the manifest: `width`, `shift_ms` and what else is worth keeping.
    """
    targets = [vocabulary.encode(text) for text in columns["transcripts"]]
    texts = {name: np.frombuffer(json.dumps(columns[name]).encode(), np.uint8) for name in TEXTS}
    arrays = {
        "values": offsets,
        "targets": np.concatenate(targets),
        "target_offsets": np.r_[0, np.cumsum([len(ids) for ids in targets])].astype(np.int64),
        "frames": np.array(columns["frames"], np.int64),
    }
    np.savez(directory / "rows.npz", **arrays, **texts)
    hashes = {name: sources.sha256(directory / name) for name in ("features.bin", "rows.npz")}
    identity = hashes["features.bin"].encode() + vocabulary.fingerprint.encode()
    identity += b"".join(
        arrays[name].astype("<i8").tobytes() for name in ("values", "targets", "target_offsets")
    )
    manifest = {
        "fingerprint": hashlib.sha256(identity).hexdigest(),
        "vocabulary": vocabulary.fingerprint,
        "utterances": len(targets),
        "tokens": len(arrays["targets"]),
        "frames": int(arrays["frames"].sum()),
        **facts,
        "sha256": hashes,
    }
    manifests.write(directory / "manifest.json", manifest)
    return SpeechStore.open(directory)
