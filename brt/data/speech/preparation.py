"""From `config.Speech` to stores of utterances: once per content, in the cache.

A prepared corpus is a directory:

    train/ validation/ test/   stores (a split without sources is absent)
    vocabulary.json            tokens of the training transcripts
    corpus.json                what it was made of; written last
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brt import config
from brt.config.fields import cached_settings
from brt.data import manifests, preparation
from brt.data.pairs import ragged
from brt.data.pairs.columns import BadRow
from brt.data.pairs.sources import Tally
from brt.data.sources import FileHash
from brt.data.speech import frames, joining, sources, store
from brt.data.speech.frames import Moments
from brt.data.speech.store import SpeechStore
from brt.data.speech.utterances import Features, Utterance
from brt.data.speech.vocabulary import Vocabulary, units
from brt.data.splits import SPLITS, split_named
from brt.errors import DataError

SKIP = "Speech.errors = 'skip'"


class SpeechCorpus(NamedTuple):
    """Prepared utterances, opened."""

    directory: Path
    tokenizer: Vocabulary
    splits: dict[str, SpeechStore]

    def split(self, name: str) -> SpeechStore:
        """The store of a split; raises DataError where there is none."""
        return split_named(self.splits, name, "utterances", "Speech")

    @property
    def width(self) -> int:
        """Of a frame that a model reads."""
        return self.split("train").width

    @property
    def longest(self) -> int:
        """Frames that a model reads of the longest utterance of all splits."""
        return max(int(store.lengths.max()) for store in self.splits.values())


def prepare(speech: config.Speech, progress: bool = True) -> SpeechCorpus:
    """Opens the utterances that `speech` describes; prepares them first where that was not done.

    The content of every file is hashed, so a changed file never meets a stale store.

    Args:
      progress: say on stderr what is done, and what was left out.

    Raises:
      DataError: a source cannot be read as asked, or an utterance is in two splits.
    """
    hashes = {split: sources.hashes(getattr(speech, split)) for split in SPLITS}
    key = _key(speech, hashes)
    directory = preparation.cache_directory(speech) / key[:32]
    preparation.make(directory, key, lambda place: _build(speech, place, key, hashes, progress))
    return open_corpus(directory)


def open_corpus(directory: Path) -> SpeechCorpus:
    """Opens a directory that `prepare` wrote.

    Raises:
      DataError: it is missing, unfinished or damaged.
    """
    manifest = preparation.read_manifest(directory)
    vocabulary = Vocabulary.load(directory / "vocabulary.json")
    splits = {split: SpeechStore.open(directory / split) for split in manifest["splits"]}
    for split, opened in splits.items():
        if opened.manifest["vocabulary"] != vocabulary.fingerprint:
            raise DataError(
                f"{directory / split} was written with another vocabulary than vocabulary.json; "
                f"delete {directory} and prepare it again"
            )
    return SpeechCorpus(directory, vocabulary, splits)


def _key(speech: config.Speech, hashes: Mapping[str, Sequence[FileHash]]) -> str:
    """sha256 of all that decides the content of the stores."""
    content = {
        "format": manifests.FORMAT,
        "kind": "speech",
        "files": hashes,
        "sources": {split: getattr(speech, split) for split in SPLITS},
        "settings": cached_settings(speech),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _build(
    speech: config.Speech,
    directory: Path,
    key: str,
    hashes: Mapping[str, Sequence[FileHash]],
    progress: bool,
) -> None:
    builder = _Builder(speech, directory)
    splits = [split for split in SPLITS if getattr(speech, split)]
    for split in splits:
        opened, tally = builder.write(split)
        if tally.bad:
            preparation.say(tally.described(), progress)
        preparation.say(f"prepared {split}: {described(opened)}", progress)
    manifest = {
        "key": key,
        "splits": splits,
        "settings": cached_settings(speech),
        "sources": {split: [file._asdict() for file in files] for split, files in hashes.items()},
    }
    manifests.write(directory / preparation.MANIFEST, manifest)


class _Builder:
    """Writes one split after another, train first, whose vocabulary the others share."""

    def __init__(self, speech: config.Speech, directory: Path):
        self._speech, self._directory = speech, directory
        self._vocabulary: Vocabulary | None = None
        self._first: Utterance | None = None  # decides width and rate
        self._seen: dict[bytes, str] = {}  # the split of each utterance

    def write(self, split: str) -> tuple[SpeechStore, Tally]:
        """The store of a split, and what it left out."""
        place, tally = self._directory / split, Tally(split, SKIP)
        place.mkdir()
        columns: dict[str, list[Any]] = {name: [] for name in (*store.TEXTS, "frames")}
        moments = self._speaker_moments(split)
        width = 0
        with ragged.Writer(place / "features.bin", store.FLOAT) as writer:
            for utterance in tally.usable(map(self._usable, self._read(split))):
                self._refuse_shared(utterance, split)
                kept = self._kept(utterance, moments)
                width = kept.shape[1]
                writer.extend([kept.ravel()])
                for name, value in (
                    ("ids", utterance.id), ("speakers", utterance.speaker),
                    ("transcripts", utterance.transcript), ("frames", len(utterance.features)),
                ):  # fmt: skip
                    columns[name].append(value)
        self._refuse(tally, split)
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of(self._speech.unit, columns["transcripts"])
            self._vocabulary.save(self._directory / "vocabulary.json")
        facts = {"width": width, "shift_ms": self._speech.shift_ms, "rows": tally.report()}
        return store.finish(place, writer.offsets, columns, self._vocabulary, facts), tally

    def _read(self, split: str) -> Iterator[Utterance]:
        """Utterances whose frames are like those of the very first one."""
        recordings = sources.recordings(getattr(self._speech, split), self._speech)
        if self._speech.join > 1:
            orders = self._speech.join_orders if split == "train" else 1
            recordings = joining.joined(
                recordings, self._speech.join, orders=orders,
                check=lambda utterance: self._refuse_shared(utterance, split),
            )  # fmt: skip
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
            yield utterance

    def _usable(self, utterance: Utterance) -> Utterance | BadRow:
        speech = self._speech
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
        if self._speech.normalization != "speaker":
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
        features, how = utterance.features, self._speech.normalization
        if how != "none":
            own = moments[utterance.speaker] if moments else frames.moments(features)
            features = frames.normalized(features, own)
        return frames.stacked(features, self._speech.stack, self._speech.stride)

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

    def _refuse(self, tally: Tally, split: str) -> None:
        if self._speech.errors == "refuse":
            tally.refuse()
        if tally.bad and tally.bad == tally.rows:
            raise DataError(tally.described())
        if not tally.rows:
            raise DataError(f"Speech.{split} = {getattr(self._speech, split)} has no utterance")


def described(opened: SpeechStore) -> str:
    """A line: how many utterances, how long, and of what."""
    m = opened.manifest
    return (
        f"{m['utterances']:,} utterances, {opened.seconds.sum() / 60:,.1f} minutes, "
        f"{m['tokens']:,} tokens, frames of {m['width']} features"
    )
