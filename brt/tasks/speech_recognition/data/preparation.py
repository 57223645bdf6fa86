"""Prepares utterances with their transcripts, which the config section Speech names.

The features of utterances are computed or read, normalised, and written to a directory of the
cache, which has a store (`SpeechStore`) for each split. Transcripts are encoded with a vocabulary,
which consists of the tokens of the training transcripts and is saved in vocabulary.json.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from brt import config
from brt.data import cache
from brt.data.rows import ragged
from brt.data.rows.preparation import Preparation, RowCorpus
from brt.data.rows.tally import BadRow, Tally
from brt.data.sources import FileHash
from brt.errors import DataError
from brt.tasks.speech_recognition.data import frames, joining, sources, store
from brt.tasks.speech_recognition.data.frames import Moments
from brt.tasks.speech_recognition.data.store import SpeechStore
from brt.tasks.speech_recognition.data.utterances import Features, Recording, Utterance
from brt.tasks.speech_recognition.data.vocabulary import Vocabulary, units


class SpeechDataset(RowCorpus[Vocabulary, SpeechStore]):
    """Prepared utterances that are opened for reading."""

    rows = "utterances"

    @property
    def width(self) -> int:
        """Number of features of each frame after frames were stacked, as a model reads them."""
        return self.split("train").width

    @property
    def rate(self) -> int:
        """Sample rate of the training wav files in Hz; 0 if not known, as for files of features."""
        return self.split("train").rate

    @property
    def longest(self) -> int:
        """Number of frames of the longest utterance in all splits, after frames were stacked."""
        return max(int(store.lengths.max()) for store in self.splits.values())


def prepare(speech: config.Speech, progress: bool = True) -> SpeechDataset:
    return SpeechPreparation(speech, progress).open()


class SpeechPreparation(Preparation):
    """Prepares and opens the utterances that a config section describes.

    The training utterances are prepared first, and determine the vocabulary, the number of features
    and the sample rate of all splits.
    """

    dataset, kind, encoding = SpeechDataset, "speech", "vocabulary"

    def __init__(self, section: config.Speech, progress: bool = True):
        super().__init__(section, progress)
        # All utterances must have the number of features and the sample rate of the first one.
        self._first: Utterance | None = None
        # The keys are hashes of the utterances read so far, and the values are the names of their
        # splits.
        self._seen: dict[bytes, str] = {}

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        return sources.hashes(names)

    def left_out(self, name: str) -> str:
        return sources.left_out(name)

    def load(self, name: str) -> Vocabulary:
        return Vocabulary.load(Path(name))

    def open_store(self, directory: Path, encoder: Vocabulary) -> SpeechStore:
        return SpeechStore.open(directory)

    def check_sources(self, hashes: cache.Hashes) -> None:
        """Accepts files that two splits have in common, such as a table of the wav files of all
        splits; the utterances of the splits are compared instead when they are written.
        """

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        moments, width, rows = self._speaker_moments(split), 0, []
        usable = tally.refuse_or_skip(map(self._usable, self._read(split)), self.section.errors)
        with ragged.Writer(directory / "features.bin", store.FLOAT) as writer:
            for utterance in usable:
                self._refuse_shared(utterance, split)
                features = self._model_features(utterance, moments)
                width = features.shape[1]
                writer.extend([features.ravel()])
                rows.append(
                    (utterance.id, utterance.speaker, utterance.transcript, len(utterance.features))
                )
        columns = dict(zip((*store.TEXTS, "frames"), zip(*rows, strict=True), strict=True))
        if self.tokenizer is None:
            self.tokenizer = Vocabulary.of(self.section.unit, columns["transcripts"])
            name, content = self.tokenizer.file
            (directory.parent / name).write_bytes(content)
        facts = {
            "width": width,
            "rate": self._first.rate if self._first else 0,
            "shift_ms": self.section.shift_ms,
            "rows": tally.report(),
        }
        opened = store.finish(directory, writer.offsets, columns, self.tokenizer, facts)
        return describe_store(opened)

    def _read(self, split: str) -> Iterator[Utterance]:
        """Yields utterances; raises DataError unless all frames have the same width and rate."""
        recordings = self.read(split)
        if self.section.join > 1:
            orders = self.section.join_orders if split == "train" else 1
            recordings = joining.join_recordings(
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
                    f"{utterance.file} has {utterance.rate} samples a second, but "
                    f"Speech.sample_rate = {wanted_rate}; convert it"
                )
            yield utterance
        if recording is None:
            raise DataError(f"Data.{split} = {getattr(self.section, split)} has no utterance")

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Recording]:
        return sources.recordings(names, self.section)

    def content(self, row: Recording) -> str:
        """Returns the id and the transcript, whose hash decides if an utterance is held out."""
        return f"{row.id}\n{row.transcript}"

    def _usable(self, utterance: Utterance) -> Utterance | BadRow:
        speech = self.section
        frame_count = -(-len(utterance.features) // speech.stride)
        tokens = units(utterance.transcript, speech.unit)
        needed = max(frames.frames_needed(tokens), 1)
        if frame_count < needed:
            problem = f"has {frame_count} frames, of which its {len(tokens)} tokens need {needed}"
            return BadRow(utterance.id, problem)
        if speech.buckets and frame_count > speech.buckets[-1]:
            problem = f"has {frame_count} frames, more than Data.buckets = {speech.buckets} hold"
            return BadRow(utterance.id, problem)
        return utterance

    def _speaker_moments(self, split: str) -> dict[str, Moments]:
        """Returns the moments of the speakers of a split, if the config normalises by speaker."""
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

        return frames.speaker_moments(check_speakers(self._read(split)))

    def _model_features(self, utterance: Utterance, moments: Mapping[str, Moments]) -> Features:
        """Returns the normalised and stacked frames that a model reads."""
        features, how = utterance.features, self.section.normalization
        if how != "none":
            by = moments[utterance.speaker] if moments else frames.moments(features)
            features = frames.normalize(features, by)
        return frames.stack_frames(features, self.section.stack, self.section.stride)

    def _refuse_shared(self, utterance: Utterance, split: str) -> None:
        """Raises DataError for speech that is in two splits, which would distort evaluations."""
        if not utterance.features.any():
            return  # Silence is not compared: it may have the same features in many utterances.
        content = utterance.transcript.encode() + utterance.features.tobytes()
        other = self._seen.setdefault(hashlib.sha256(content).digest(), split)
        if other != split:
            raise DataError(
                f"{utterance.id} of Data.{split} ({utterance.file}) is in Data.{other}, too; "
                "remove it from one of them"
            )


def describe_store(opened: SpeechStore) -> str:
    m = opened.manifest
    return (
        f"{m['utterances']:,} utterances, {opened.seconds.sum() / 60:,.1f} minutes, "
        f"{m['tokens']:,} tokens, frames of {m['width']} features"
    )
