"""Reads and hashes the sources of speech: files of several kinds, and generated utterances.

The docstring of the class `brt.config.Speech` lists the kinds and their names in the config.

An .npz file has features and transcripts of many utterances. The array `features` [frames,
features] has the frames of all utterances one after another. The arrays `lengths` (numbers of
frames), `ids`, `transcripts` and, optionally, `speakers` have an element for each utterance.

A table (.tsv) has a line for each wav file. The header names the columns `file` and `transcript`,
and optionally `speaker` and `split`.

Kaldi's data directories list utterances with wav files or archives of features. Such a directory
has the table `text` with the transcript of each utterance. It also has one of two tables: `wav.scp`
with the wav file of each utterance, or `feats.scp` with the place of the utterance's features in an
archive. The table `utt2spk` with the speakers is optional.

Generated speech is for tests and examples, and the same on every machine. The transcript of an
utterance consists of six to eight words from a fixed lexicon of 40 words. A word has two to four
letters, and there are twelve different letters. Neighbouring letters of a word differ. Each letter
sounds like a vowel: two peaks in a spectrum of 20 bands, over three to nine frames, with a
transition to the next letter. A space between words is silent. Each speaker shifts all peaks up or
down, and the shifts of two speakers may differ by more than the distance between the peaks of
different letters. Therefore a single frame does not determine its letter, and the model needs the
rest of the utterance. Speakers also differ in loudness, and noise is added.

In shapes, X is the number of frames, and F = 20 the number of bands of generated speech.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from brt import config, untrusted
from brt.data import contents, generated, sources
from brt.data.sources import File, FileHash
from brt.data.tables import unique
from brt.errors import DataError
from brt.tasks.speech_recognition import filter_bank
from brt.tasks.speech_recognition.utterances import Recording

NEEDED_ARRAYS = ("features", "lengths", "ids", "transcripts")
KINDS = {"features": "fiu", "lengths": "iu", "ids": "Uiu", "transcripts": "U", "speakers": "Uiu"}
NEEDED_COLUMNS = ("file", "transcript")


def recordings(names: Sequence[str], speech: config.Speech) -> Iterator[Recording]:
    """Yields the utterances of all sources in order; the features of each are read later."""
    for name in names:
        if name.startswith(generated.PREFIX):
            yield from generated_recordings(name)
        elif _is_table(name):
            yield from table_recordings(name, speech)
        elif Path(name).is_dir():
            yield from kaldi_recordings(Path(name), speech)
        else:
            yield from array_recordings(_array_file(name))


def hashes(names: Sequence[str]) -> list[FileHash]:
    """Returns the name, size and hash of every file of some sources.

    For a table, the files are its wav files, and one more entry has the hash of the table's
    selected rows. A generated source has no files, but one entry with a hash of its name and
    version.
    """
    file_hashes = []
    for name in names:
        if name.startswith(generated.PREFIX):
            file_hashes.append(FileHash(name, 0, generated.digest(name, f"speech {VERSION}")))
            continue
        if _is_table(name):
            text = json.dumps(table_rows(name))
            content = hashlib.sha256(text.encode()).hexdigest()
            file_hashes.append(FileHash(name, len(text), content))
        file_hashes += [sources.hashed(File(str(path), path)) for path in _files(name)]
    return file_hashes


def left_out(name: str) -> str:
    """Returns a sentence that names the files of a directory that are not read; "" if none."""
    path = Path(name)
    return sources.left_out(name, (), kaldi_files(path)) if path.is_dir() else ""


def _files(name: str) -> list[Path]:
    if _is_table(name):
        return [parse_table(name)[0].parent / row["file"] for row in table_rows(name)]
    path = Path(name)
    return kaldi_files(path) if path.is_dir() else [_array_file(name)]


def _is_table(name: str) -> bool:
    return parse_table(name)[0].suffix == ".tsv"


def _array_file(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise DataError(f"{name} does not exist")
    if path.suffix != ".npz":
        raise DataError(
            f"{name} is no source of speech: that is a .npz file, a .tsv table of wav files, a "
            "Kaldi-style directory, or generated:NAME/COUNT"
        )
    return path


def array_recordings(path: Path) -> Iterator[Recording]:
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
            partial(_without_rate, np.asarray, frames),
        )  # fmt: skip


def _without_rate(load: Callable[..., np.ndarray], *given: Any) -> tuple[np.ndarray, int]:
    return load(*given), 0


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with untrusted.npz(path) as file:
            existing = ", ".join(file)
            missing = [name for name in NEEDED_ARRAYS if name not in file]
            for name in KINDS.keys() & file.keys():
                if file[name].dtype.kind not in KINDS[name]:
                    raise ValueError(f"{name} is of {file[name].dtype}")
            if not missing:
                return {name: file[name].read() for name in KINDS if name in file}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no .npz file of plain arrays ({error})") from error
    raise DataError(f"{path} has no array {missing[0]!r}; it has {existing}")


def parse_table(source: str) -> tuple[Path, str]:
    """Returns the path and the split in the name of a source, PATH.tsv[:SPLIT].

    The split selects rows of the table; it is "" for the whole table.
    """
    path, _, split = source.rpartition(":")
    path, split = (path, split) if path.endswith(".tsv") else (source, "")
    return Path(path), split


def table_recordings(source: str, speech: config.Speech) -> Iterator[Recording]:
    """Yields the utterances of a table; paths of wav files are relative to its directory."""
    table, _ = parse_table(source)
    for row in table_rows(source):
        path = table.parent / row["file"]
        yield Recording(
            str(path), row["file"], row.get("speaker") or "", row["transcript"],
            partial(filter_bank.read, path, speech),
        )  # fmt: skip


def table_rows(source: str) -> list[dict[str, str]]:
    """Returns the rows of a source PATH.tsv[:SPLIT].

    If the source names a SPLIT, these are the rows that have SPLIT in the column `split`.
    """
    path, split = parse_table(source)
    lines = contents.small_text(path).replace("\r\n", "\n").split("\n")
    columns, *values = [line.split("\t") for line in lines if line] or [[]]
    unique(str(path), columns)
    for name in (*NEEDED_COLUMNS, "split") if split else NEEDED_COLUMNS:
        if name not in columns:
            raise DataError(f"{path} has no column {name!r}; it has {', '.join(columns)}")
    for number, row in enumerate(values, 2):
        if len(row) != len(columns):
            raise DataError(f"{path}:{number} has another number of columns than the header")
    named = [dict(zip(columns, row, strict=True)) for row in values]
    if not split:
        return named
    chosen = [row for row in named if row["split"] == split]
    if not chosen:
        splits = ", ".join(sorted({row["split"] for row in named}))
        raise DataError(f"{path} has no row of the split {split!r}; it has {splits}")
    return chosen


BLANKS = " \t\r"
TABLES = ("text", "utt2spk", "wav.scp", "feats.scp")
_FLOATS: dict[bytes, np.dtype] = {b"FM ": np.dtype("<f4"), b"DM ": np.dtype("<f8")}


def kaldi_recordings(directory: Path, speech: config.Speech) -> Iterator[Recording]:
    """Yields every utterance that the file `text` of a Kaldi data directory lists.

    The settings in `speech` say how features are computed from wav files. Raises DataError if a
    table is missing or lacks an utterance, or if wav.scp contains commands.
    """
    transcripts = table(directory / "text")
    speakers = table(directory / "utt2spk") if (directory / "utt2spk").exists() else {}
    archived, places = locations(directory)
    for id, transcript in transcripts.items():
        if id not in places:
            raise DataError(f"{directory} has no audio for {id}, which its text has")
        load = partial(filter_bank.read, Path(places[id]), speech)
        if archived:
            load = partial(_without_rate, read_matrix, places[id])
        yield Recording(str(directory), id, speakers.get(id, ""), transcript, load)


def kaldi_files(directory: Path) -> list[Path]:
    """Returns the paths of the directory's tables, and of the files that the tables name."""
    existing = [directory / name for name in TABLES if (directory / name).exists()]
    archived, places = locations(directory)
    named = {where.rpartition(":")[0] if archived else where for where in places.values()}
    return [*existing, *map(Path, sorted(named))]


def locations(directory: Path) -> tuple[bool, dict[str, str]]:
    """Returns a bool, True if the directory has a feats.scp, and a dict of places of utterances.

    The keys of the dict are the ids of the utterances. If there is a feats.scp, a place is
    ARCHIVE:POSITION, where POSITION is a byte offset in an archive of features. Otherwise a place
    is the path of a wav file, which wav.scp lists.
    """
    archived = (directory / "feats.scp").exists()
    path = directory / ("feats.scp" if archived else "wav.scp")
    if not path.exists():
        raise DataError(f"{directory} has neither feats.scp nor wav.scp")
    if not archived and (directory / "segments").exists():
        raise DataError(
            f"{directory} cuts its wav files by `segments`; compute features of its utterances "
            "(feats.scp), or write a wav file of each"
        )
    places = table(path)
    for id, where in places.items():
        if where.endswith("|"):
            raise DataError(
                f"{path} has a command for {id} ({where}); brt runs none: write wav files and "
                "name them there"
            )
    return archived, places


def table(path: Path) -> dict[str, str]:
    """Returns a dict with the keys and values of a table, such as {"utterance-1": "a transcript"}.

    The first word of each line is the key, and the rest of the line is the value.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(contents.small_text(path).split("\n"), 1):
        if not (line := line.strip(BLANKS)):
            continue
        id, *rest = re.split(f"[{BLANKS}]+", line, maxsplit=1)
        if id in values:
            raise DataError(f"{path}:{number} has {id} a second time; remove one of the lines")
        values[id] = rest[0] if rest else ""
    return values


def read_matrix(where: str) -> np.ndarray:
    """Returns the matrix of floats [frames, features] at the place `where`, ARCHIVE:POSITION."""
    archive, _, position = where.rpartition(":")
    try:
        with untrusted.open_file(archive) as file:
            size = os.fstat(file.fileno()).st_size
            if not re.fullmatch("[0-9]{1,19}", position) or int(position) > size:
                raise ValueError(f"it has {size:,} bytes")
            file.seek(int(position))
            return _matrix(file, where, size - int(position))
    except (OSError, ValueError) as error:
        raise DataError(f"{where} holds no matrix ({error})") from error


def _matrix(file: io.BufferedReader, where: str, remaining: int) -> np.ndarray:
    start = file.read(5)
    if start[:2] != b"\0B":
        raise ValueError("it is not in Kaldi's binary format")
    if start[2:] not in _FLOATS:
        kind = start[2:].decode("ascii", "replace").strip()
        raise DataError(
            f"{where} holds a matrix of kind {kind!r}, not plain floats (FM or DM); write it "
            "again with copy-feats --compress=false"
        )
    sizes = np.frombuffer(file.read(10), np.dtype([("bytes", "i1"), ("value", "<i4")]))
    rows, columns = (int(size) for size in sizes["value"])
    dtype = _FLOATS[start[2:]]
    if min(rows, columns) < 0 or rows * columns * dtype.itemsize > remaining:
        raise ValueError(f"it ends before {rows:,} rows of {columns:,}")
    return np.frombuffer(file.read(rows * columns * dtype.itemsize), dtype).reshape(rows, columns)


# The hash of a generated source depends on this number. The number must be increased if the
# generated sound changes, so that data in the cache are prepared again.
VERSION = 1
BANDS = 20
LETTERS = "abcdefghiklm"
WORDS = 40
SPEAKERS = 20  # The utterances of a source are spoken by at most this number of speakers.
NOISE = 0.3


def generated_recordings(source: str) -> Iterator[Recording]:
    """Yields the utterances of a source `generated:NAME/COUNT`; NAME determines all of them."""
    name, count = generated.parse(source)
    words = lexicon()
    for number in range(count):
        draw = _draw(f"{name}/{number}")
        speaker = f"{name}-{draw.randint(SPEAKERS)}"
        transcript = " ".join(words[i] for i in draw.randint(len(words), size=draw.randint(6, 9)))
        id = f"{name}-{number:05}"
        load = partial(_without_rate, sound, transcript, speaker, id)
        yield Recording(source, id, speaker, transcript, load)


def lexicon() -> list[str]:
    """Returns the words from which transcripts are composed, all different."""
    draw, words = _draw("lexicon"), {}
    while len(words) < WORDS:
        letters = draw.randint(len(LETTERS), size=draw.randint(2, 5))
        if np.diff(letters).all():
            words["".join(LETTERS[i] for i in letters)] = None
    return list(words)


def sound(transcript: str, speaker: str, id: str) -> Float[np.ndarray, "X F"]:
    """Returns the strength of each band in each frame of an utterance.

    The speaker's name determines the shift of the peaks and the loudness, and `id` determines the
    noise and the durations of the letters.
    """
    draw, speaker_draw = _draw(f"sound {id}"), _draw(f"speaker {speaker}")
    shift, loudness = speaker_draw.uniform(-1.2, 1.2), speaker_draw.uniform(-0.5, 0.5)
    spectra = np.array([_spectrum(letter, shift) for letter in f" {transcript} "])
    frames = draw.randint(3, 10, size=len(spectra))
    frames[[0, -1]] += 4
    middle = np.cumsum(frames) - frames / 2
    time = np.arange(frames.sum())
    clean = [np.interp(time, middle, band) for band in spectra.T]
    noise = NOISE * draw.standard_normal((len(time), BANDS))
    return (np.array(clean).T + loudness + noise).astype(np.float32)


def _spectrum(letter: str, shift: float) -> np.ndarray:
    if letter == " ":
        return np.zeros(BANDS)
    # Each of the twelve letters combines one of three low peaks with one of four high peaks.
    low, high = divmod(LETTERS.index(letter), 4)
    band = np.arange(BANDS)
    peaks = (3.5 + 2 * low + shift, 10.5 + 2 * high + shift)
    first, second = (2 * np.exp(-0.5 * (band - peak) ** 2) for peak in peaks)
    return first + second


def _draw(purpose: str) -> np.random.RandomState:
    return generated.draw(f"{VERSION}:{purpose}")
