"""From `config.Speech` to stores of utterances: once per content, in the cache.

What encodes them is vocabulary.json, the tokens of the training transcripts.
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


class SpeechCorpus(RowCorpus[Vocabulary, SpeechStore]):
    """Prepared utterances, opened."""

    section, rows = "Speech", "utterances"

    @property
    def width(self) -> int:
        """Of a frame that a model reads."""
        return self.split("train").width

    @property
    def rate(self) -> int:
        """Samples a second of the wav files; 0 where features were read."""
        return self.split("train").rate

    @property
    def longest(self) -> int:
        """Frames that a model reads of the longest utterance of all splits."""
        return max(int(store.lengths.max()) for store in self.splits.values())


def prepare(speech: config.Speech, progress: bool = True) -> SpeechCorpus:
    """Opens the utterances that `speech` describes; prepares them first where that was not done.

    Args:
      progress: say on stderr what is done, and what was left out.

    Raises:
      DataError: a source cannot be read as asked, or an utterance is in two splits.
    """
    return SpeechPreparation(speech, progress).open()


class SpeechPreparation(Preparation):
    """Train comes first, whose vocabulary, width and rate the others share."""

    dataset, kind, encoding = SpeechCorpus, "speech", "vocabulary"

    def __init__(self, section: config.Speech, progress: bool):
        super().__init__(section, progress)
        self._first: Utterance | None = None  # decides width and rate
        self._seen: dict[bytes, str] = {}  # the split of each utterance

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        return sources.hashes(names)

    def left_out(self, name: str) -> str:
        return sources.left_out(name)

    def load(self, name: str) -> Vocabulary:
        return Vocabulary.load(Path(name))

    def open_store(self, directory: Path, encoder: Vocabulary) -> SpeechStore:
        return SpeechStore.open(directory)

    def check_sources(self, hashes: cache.Hashes) -> None:
        """Utterances are compared instead: a table of files may name them for all splits."""

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        moments, width, rows = self._speaker_moments(split), 0, []
        found = tally.settled(map(self._usable, self._read(split)), self.section.errors)
        with ragged.Writer(directory / "features.bin", store.FLOAT) as writer:
            for utterance in found:
                self._refuse_shared(utterance, split)
                kept = self._kept(utterance, moments)
                width = kept.shape[1]
                writer.extend([kept.ravel()])
                _, id, speaker, transcript, features, _ = utterance
                rows.append((id, speaker, transcript, len(features)))
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
        return described(opened)

    def _read(self, split: str) -> Iterator[Utterance]:
        """Utterances whose frames are like those of the very first one."""
        recordings = self.read(split)
        if self.section.join > 1:
            orders = self.section.join_orders if split == "train" else 1
            recordings = joining.joined(
                recordings, self.section.join, orders=orders,
                check=lambda utterance: self._refuse_shared(utterance, split),
            )  # fmt: skip
        recording = None
        for recording in recordings:
            utterance = recording.read()
            first = self._first = self._first or utterance
            found, wanted = utterance.features.shape[1], first.features.shape[1]
            if found != wanted:
                raise DataError(
                    f"{utterance.file} has {found} features a frame where {first.file} has "
                    f"{wanted}; compute both alike"
                )
            if utterance.rate != first.rate:
                raise DataError(
                    f"{utterance.file} has {utterance.rate} samples a second where {first.file} "
                    f"has {first.rate}; convert one of them"
                )
            wanted_rate = self.section.sample_rate  # of features nobody knows it
            if wanted_rate and utterance.rate not in (0, wanted_rate):
                raise DataError(
                    f"{utterance.file} has {utterance.rate} samples a second, but "
                    f"Speech.sample_rate = {wanted_rate}; convert it"
                )
            yield utterance
        if recording is None:
            raise DataError(f"Speech.{split} = {getattr(self.section, split)} has no utterance")

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Recording]:
        return sources.recordings(names, self.section)

    def content(self, row: Recording) -> str:
        return f"{row.id}\n{row.transcript}"

    def _usable(self, utterance: Utterance) -> Utterance | BadRow:
        speech = self.section
        frames_there = -(-len(utterance.features) // speech.stride)
        tokens = units(utterance.transcript, speech.unit)
        needed = max(frames.needed(tokens), 1)
        if frames_there < needed:
            problem = f"has {frames_there} frames, of which its {len(tokens)} tokens need {needed}"
            return BadRow(utterance.id, problem)
        if speech.buckets and frames_there > speech.buckets[-1]:
            problem = f"has {frames_there} frames, more than Speech.buckets = {speech.buckets} hold"
            return BadRow(utterance.id, problem)
        return utterance

    def _speaker_moments(self, split: str) -> dict[str, Moments]:
        """Of the speakers of a split, where these are asked for."""
        if self.section.normalization != "speaker":
            return {}

        def named(utterances: Iterator[Utterance]) -> Iterator[Utterance]:
            for utterance in utterances:
                if not utterance.speaker:
                    raise DataError(
                        f"{utterance.file} does not say who speaks in {utterance.id}, which "
                        "Speech.normalization = 'speaker' needs; set it to 'utterance'"
                    )
                yield utterance

        return frames.speaker_moments(named(self._read(split)))

    def _kept(self, utterance: Utterance, moments: Mapping[str, Moments]) -> Features:
        """The frames that a model reads."""
        features, how = utterance.features, self.section.normalization
        if how != "none":
            own = moments[utterance.speaker] if moments else frames.moments(features)
            features = frames.normalized(features, own)
        return frames.stacked(features, self.section.stack, self.section.stride)

    def _refuse_shared(self, utterance: Utterance, split: str) -> None:
        """Raises DataError for speech in two splits, which makes held-out numbers wrong."""
        if not utterance.features.any():
            return  # silence is like silence
        content = utterance.transcript.encode() + utterance.features.tobytes()
        other = self._seen.setdefault(hashlib.sha256(content).digest(), split)
        if other != split:
            raise DataError(
                f"{utterance.id} of Speech.{split} ({utterance.file}) is in Speech.{other}, too; "
                "take it out of one of them"
            )


def described(opened: SpeechStore) -> str:
    """A line: how many utterances, how long, and of what."""
    m = opened.manifest
    return (
        f"{m['utterances']:,} utterances, {opened.seconds.sum() / 60:,.1f} minutes, "
        f"{m['tokens']:,} tokens, frames of {m['width']} features"
    )
