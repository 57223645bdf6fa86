"""Prepares utterances with their transcripts, which the config section Speech names.

The features of utterances are computed or read, normalised, and written to a directory of the
cache, which has a store (`SpeechStore`) for each split. Transcripts are encoded with a vocabulary,
which consists of the tokens of the training transcripts and is saved in vocabulary.json. Batches
consist of utterances of similar length, padded to one of a few lengths.

A store is a directory with these files:

    features.bin    little-endian float32: the frames that a model reads, utterance after utterance
    rows.npz        for each utterance, its offset in features.bin, the tokens of its transcript,
                    and its number of frames before frames were stacked; ids, speakers and
                    transcripts are JSON lists in UTF-8
    manifest.json   written last: counts, the number of features of a frame, the sample rate,
                    utterances that were left out, hashes

Frames are stacked before they are written: a frame that a model reads consists of one or several
consecutive frames of the utterance (Speech.stack).
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int

from brt import config, untrusted
from brt.data import stores
from brt.data.preparation import Corpus, Hashes, RowPreparation
from brt.data.quarantine import BadRow, Tally
from brt.data.readers import RowReader, padded
from brt.data.stores import Ragged, RowStore
from brt.errors import DataError
from brt.tasks.speech_recognition import sources, utterances
from brt.tasks.speech_recognition.filter_bank import SHIFT_MS
from brt.tasks.speech_recognition.utterances import Features, Moments, Recording, Utterance
from brt.types import SpeechBatch

# This token, whose id is 0, stands for tokens of held-out transcripts that do not occur in the
# training transcripts.
UNKNOWN = "\ufffd"

Unit = Literal["characters", "words"]


def units(transcript: str, unit: Unit) -> list[str]:
    return list(transcript) if unit == "characters" else transcript.split()


class Vocabulary:
    """Maps the tokens of transcripts to ids, and ids to tokens.

    The id of `UNKNOWN` is 0, and the ids of the other tokens are 1, 2, ... The blank of CTC is not
    a part of the vocabulary. The attributes are described in `brt.tasks.weights.Tokenizer`.
    """

    beside: ClassVar[dict[str, bytes]] = {}

    def __init__(self, unit: Unit, tokens: Iterable[str]):
        self.unit: Unit = unit
        self.tokens = (UNKNOWN, *tokens)
        self.name = f"the {unit} of the transcripts"
        self.fingerprint = hashlib.sha256(json.dumps([unit, self.tokens]).encode()).hexdigest()
        self._ids = {token: i for i, token in enumerate(self.tokens)}

    @classmethod
    def of(cls, unit: Unit, transcripts: Iterable[str]) -> "Vocabulary":
        """Returns the vocabulary of the tokens that occur in transcripts, in sorted order."""
        return cls(unit, sorted({token for text in transcripts for token in units(text, unit)}))

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Returns the vocabulary in a file; raises DataError if it is missing or damaged."""
        try:
            saved = untrusted.read_json(path, {"unit": Unit, "tokens": [str]})
            return cls(saved["unit"], saved["tokens"])
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is damaged ({error}); delete {path.parent} and prepare it again"
            ) from error

    @property
    def file(self) -> tuple[str, bytes]:
        saved = {"unit": self.unit, "tokens": self.tokens[1:]}
        return "vocabulary.json", json.dumps(saved).encode()

    @property
    def vocab_size(self) -> int:
        """Number of ids, including the id of `UNKNOWN`."""
        return len(self.tokens)

    def encode(self, transcript: str) -> Int[np.ndarray, " T"]:
        """Returns the ids of a transcript's tokens; unknown tokens have the id 0."""
        ids = [self._ids.get(token, 0) for token in units(transcript, self.unit)]
        return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the transcript with these token ids; ids that are too large become `UNKNOWN`."""
        tokens = [self.tokens[i] if i < len(self.tokens) else UNKNOWN for i in map(int, ids)]
        return ("" if self.unit == "characters" else " ").join(tokens)


TEXTS = ("ids", "speakers", "transcripts")
FLOAT = np.dtype("<f4")
_FACTS = {
    **dict.fromkeys(("utterances", "tokens", "frames", "width"), int),
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
        with stores.opened(directory, facts=_FACTS) as opened:
            values = opened.on_disk("features.bin", FLOAT, opened.columns["values"], "utterances")
            targets = opened.ragged("targets")
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
        """Number of features of each frame that a model reads, after frames were stacked."""
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
        return self.frames * (SHIFT_MS / 1000)

    @property
    def transcript_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.transcripts)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeechReader(RowReader):
    store: SpeechStore

    def gather(self, rows: np.ndarray, length: int) -> SpeechBatch:
        store, tokens = self.store, max(int(self.store.targets.lengths.max()), 1)
        features = padded(rows, store.features, length, np.float32, width=(store.width,))
        targets = padded(rows, store.targets.__getitem__, tokens, np.int32)
        return SpeechBatch(*features, *targets, np.asarray(rows, np.int32))


class SpeechDataset(Corpus[Vocabulary, SpeechStore]):
    """Prepared utterances that are opened for reading."""

    rows = "utterances"

    @property
    def longest(self) -> int:
        """Number of frames of the longest utterance in all splits, after frames were stacked."""
        return max(int(store.lengths.max()) for store in self.splits.values())


class SpeechPreparation(RowPreparation):
    """Prepares and opens the utterances that a config section describes.

    The training utterances are prepared first, and determine the vocabulary, the number of features
    and the sample rate of all splits.
    """

    dataset, store, kind, encoding = SpeechDataset, SpeechStore, "speech", "vocabulary"
    hashes, left_out = staticmethod(sources.hashes), staticmethod(sources.left_out)

    def __init__(self, section: config.Speech, progress: bool = True):
        super().__init__(section, progress)
        # All utterances must have the number of features and the sample rate of the first one.
        self._first: Utterance | None = None
        # The keys are hashes of the utterances read so far, and the values are the names of their
        # splits.
        self._seen: dict[bytes, str] = {}

    @staticmethod
    def load(name: str) -> Vocabulary:
        return Vocabulary.load(Path(name))

    def check_sources(self, hashes: Hashes) -> None:
        """Does nothing, so that two splits may have files in common.

        For example, a table may list the wav files of all splits. Instead of the files, `write`
        compares the utterances of the splits.
        """

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        moments, width, rows = self._speaker_moments(split), 0, []
        usable = tally.refuse_or_skip(map(self._usable, self._read(split)), self.section.errors)
        with stores.RaggedWriter(directory / "features.bin", FLOAT) as writer:
            for utterance in usable:
                self._refuse_shared(utterance, split)
                features = self._model_features(utterance, moments)
                width = features.shape[1]
                writer.extend([features.ravel()])
                rows.append(
                    (utterance.id, utterance.speaker, utterance.transcript, len(utterance.features))
                )
        columns = dict(zip((*TEXTS, "frames"), zip(*rows, strict=True), strict=True))
        if self.tokenizer is None:
            self.tokenizer = Vocabulary.of(self.section.unit, columns["transcripts"])
            name, content = self.tokenizer.file
            (directory.parent / name).write_bytes(content)
        targets = Ragged.from_rows([*map(self.tokenizer.encode, columns["transcripts"])])
        fingerprint = self.tokenizer.fingerprint
        numbers = writer.offsets, targets.values[:], targets.offsets
        identity = b"".join(array.astype("<i8").tobytes() for array in numbers)
        frames = np.array(columns["frames"], np.int64)
        facts = {
            "vocabulary": fingerprint,
            "utterances": len(targets),
            "tokens": len(targets.values),
            "frames": int(frames.sum()),
            "width": width,
            "rate": self._first.rate if self._first else 0,
            "rows": tally.report(),
        }
        stores.finish(
            directory, {"values": writer.offsets, "targets": targets, **columns, "frames": frames},
            facts, files=("features.bin",), identity=fingerprint.encode() + identity,
        )  # fmt: skip
        minutes = frames.sum() * SHIFT_MS / 60_000
        return (
            f"{len(targets):,} utterances, {minutes:,.1f} minutes, {len(targets.values):,} tokens, "
            f"frames of {width} features"
        )

    def _read(self, split: str) -> Iterator[Utterance]:
        """Yields the utterances of a split.

        Raises DataError unless all have the same number of features and the same sample rate.
        """
        recordings = self.read(split)
        if self.section.join > 1:
            orders = self.section.join_orders if split == "train" else 1
            recordings = utterances.join_recordings(
                recordings, self.section.join, orders=orders,
                check=lambda utterance: self._refuse_shared(utterance, split),
            )  # fmt: skip
        recording = None
        for recording in recordings:
            utterance = recording.read()
            first = self._first = self._first or utterance
            width, wanted = utterance.features.shape[1], first.features.shape[1]
            if width != wanted:
                raise DataError(
                    f"{utterance.file} has {width} features a frame where {first.file} has "
                    f"{wanted}; compute both alike"
                )
            if utterance.rate != first.rate:
                raise DataError(
                    f"{utterance.file} has {utterance.rate} samples a second where {first.file} "
                    f"has {first.rate}; convert one of them"
                )
            # Files of features do not contain a sample rate, so the rate of their utterances is 0.
            wanted_rate = self.section.sample_rate
            if wanted_rate and utterance.rate not in (0, wanted_rate):
                raise DataError(
                    f"{utterance.file} has {utterance.rate} samples a second, but the training "
                    f"data have {wanted_rate}; convert it"
                )
            yield utterance
        if recording is None:
            raise DataError(f"Data.{split} = {getattr(self.section, split)} has no utterance")

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Recording]:
        return sources.recordings(names, self.section)

    def content(self, row: Recording) -> str:
        """Returns the id and the transcript; their hash decides if the utterance is held out."""
        return f"{row.id}\n{row.transcript}"

    def _usable(self, utterance: Utterance) -> Utterance | BadRow:
        speech = self.section
        frame_count = -(-len(utterance.features) // speech.stack)
        tokens = units(utterance.transcript, speech.unit)
        needed = max(utterances.frames_needed(tokens), 1)
        if frame_count < needed:
            problem = f"has {frame_count} frames, of which its {len(tokens)} tokens need {needed}"
            return BadRow(utterance.id, problem)
        if speech.buckets and frame_count > speech.buckets[-1]:
            problem = f"has {frame_count} frames, more than Data.buckets = {speech.buckets} hold"
            return BadRow(utterance.id, problem)
        return utterance

    def _speaker_moments(self, split: str) -> dict[str, Moments]:
        """Returns the moments of each speaker; {} if Speech.normalization is not "speaker"."""
        if self.section.normalization != "speaker":
            return {}

        def check_speakers(utterances: Iterator[Utterance]) -> Iterator[Utterance]:
            for utterance in utterances:
                if not utterance.speaker:
                    raise DataError(
                        f"{utterance.file} does not say who speaks in {utterance.id}, which "
                        "Speech.normalization = 'speaker' needs; set it to 'utterance'"
                    )
                yield utterance

        return utterances.speaker_moments(check_speakers(self._read(split)))

    def _model_features(self, utterance: Utterance, moments: Mapping[str, Moments]) -> Features:
        """Returns the normalised and stacked frames that a model reads.

        `moments` has the moments of each speaker. If it is empty, features are normalised with the
        moments of the utterance itself.
        """
        features, how = utterance.features, self.section.normalization
        if how != "none":
            by = moments[utterance.speaker] if moments else utterances.moments(features)
            features = utterances.normalize(features, by)
        return utterances.stack_frames(features, self.section.stack)

    def _refuse_shared(self, utterance: Utterance, split: str) -> None:
        """Raises DataError if an utterance is in two splits, because this distorts evaluations."""
        if not utterance.features.any():
            return  # Silence is not compared: it may have the same features in many utterances.
        content = utterance.transcript.encode() + utterance.features.tobytes()
        other = self._seen.setdefault(hashlib.sha256(content).digest(), split)
        if other != split:
            raise DataError(
                f"{utterance.id} of Data.{split} ({utterance.file}) is in Data.{other}, too; "
                "remove it from one of them"
            )
