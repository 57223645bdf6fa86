"""Resolves the names of data sources to files, and hashes the files. A name has one of these forms:

    books/a.txt  books/  'books/*.txt'   a file, a directory (with subdirectories), a pattern
    corpus:novels/train                  documents that are part of brt
    tfds:NAME[/CONFIG][:VERSION]/SPLIT   a prepared TensorFlow dataset, in ArrayRecord format
    memory:copy/train/1000?distance=96   generated documents; see `brt.data.memory_tasks`

The suffix of a file determines how the file is read (see `brt.data.formats`). Files may be
compressed (.gz, .xz, .zst).
"""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brt import storage, untrusted
from brt.config.fields import MEMORY
from brt.data import contents, formats, memory_tasks
from brt.data.contents import File
from brt.data.formats import DOCUMENTS, TEXT
from brt.data.quarantine import BadRecord
from brt.errors import DataError

CORPORA = Path(__file__).parent / "corpora"
# `walk` gives one of these reasons for a path that cannot be read.
DEAD = "links to nothing"
CLOSED = "directories that cannot be read"
ODD = "neither files nor directories"


class Walk(NamedTuple):
    """The content of a directory and its subdirectories, without hidden files and directories."""

    files: list[Path]  # regular files, sorted by path
    missed: list[tuple[Path, str]]  # paths that cannot be read, with `DEAD`, `CLOSED` or `ODD`


def walk(top: Path) -> Walk:
    """Returns all files below the directory `top`, and the entries that cannot be read.

    Each directory is visited only once, even if links form cycles. Directories are visited before
    links to directories, so that the path of a file contains links only if the file cannot be
    reached without links.
    """
    result = Walk([], [])
    places, links, seen = [top], [], set()
    while places or links:
        place = places.pop() if places else links.pop(0)
        if (real := os.path.realpath(place)) in seen:
            continue
        seen.add(real)
        try:
            with os.scandir(place) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        except OSError:
            result.missed.append((place, CLOSED))
            continue
        for path in (place / name for name in names):
            # Path.is_dir might raise an error, but os.path.isdir never does.
            if os.path.isdir(path):
                (links if os.path.islink(path) else places).append(path)
            elif os.path.isfile(path):
                result.files.append(path)
            else:
                result.missed.append((path, DEAD if os.path.islink(path) else ODD))
    result.files.sort()
    return result


class FileHash(NamedTuple):
    """The name of a file, its size in bytes, and the SHA-256 of its content."""

    name: str
    bytes: int
    sha256: str


def files(source: str, endings: Sequence[str] = DOCUMENTS) -> list[File]:
    """Returns the files of a source in reading order; raises DataError if it names none.

    Files of a directory are those with the suffixes `endings` that are neither hidden nor empty.
    Generated documents have no files, except the novels from which some of them take text.
    """
    if source.startswith("corpus:"):
        return _corpus_files(source, endings)
    if source.startswith(MEMORY):
        novels = memory_tasks.parse(source).novels
        return _corpus_files(novels, endings) if novels else []
    if source.startswith("tfds:"):
        return [
            File(f"{source} {path.name}", path) for path in map(Path, tfds_data(source).filepaths)
        ]
    if (copy := storage.matching(source)) != source:
        return [File(storage.shown(file.name), file.path) for file in files(copy, endings)]
    path = Path(source)
    # Path.exists would raise an error if the name is too long, but os.path.exists returns False.
    if os.path.exists(path):
        return _path_files(path, endings)
    if not glob.has_magic(source):
        raise DataError(f"{source} does not exist")
    matches = sorted(set(_matches(str(path))))
    if not matches:
        raise DataError(f"the pattern {source} matches no file")
    return _once([file for match in matches for file in _path_files(Path(match), endings)])


def _once(candidates: list[File]) -> list[File]:
    """Returns the files. Of several names of the same file, such as links, the first one counts."""
    paths = [os.path.realpath(file.path) for file in candidates]
    last_names = dict(zip(reversed(paths), reversed(candidates), strict=True))
    return [file for file, path in zip(candidates, paths, strict=True) if last_names[path] is file]


def _matches(pattern: str) -> Iterator[str]:
    """Expands a pattern like `glob.glob`, but `**` enters every directory only once."""
    # Links between directories may form cycles, which `glob.glob` would follow again and again.
    if os.path.basename(pattern) == "**":
        pattern = f"{pattern}/*"
    head, stars, tail = pattern.partition("**/")
    if not stars or (head and head[-1] != "/"):
        yield from glob.glob(pattern)
        return
    seen = set()
    for top in glob.glob(head) if head else ["."]:
        for place, inside, _ in os.walk(top, followlinks=True, onerror=_closed):
            real = os.path.realpath(place)
            inside[:] = sorted(n for n in inside if real not in seen and not n.startswith("."))
            if real not in seen:
                seen.add(real)
                below = os.path.join(glob.escape(place), tail)
                yield from _matches(below if head else below.removeprefix("./"))


def _closed(error: OSError) -> None:
    raise DataError(
        f"the directory {error.filename} cannot be read: {error.strerror}; make it readable, or "
        "name the other sources"
    )


def sha256(path: Path) -> str:
    with untrusted.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(sources: Sequence[str], endings: Sequence[str] = DOCUMENTS) -> list[FileHash]:
    return [hashed(file) for source in sources for file in files(source, endings)]


def hashed(file: File) -> FileHash:
    try:
        digest = sha256(file.path)
        return FileHash(file.name, file.path.stat().st_size, digest)
    except OSError as error:
        raise DataError(f"{file.name} cannot be read: {error.strerror}") from error


def left_out(source: str, endings: Sequence[str] = DOCUMENTS, read: Iterable[Path] = ()) -> str:
    """Returns a sentence that counts the files of a directory that are not read; "" for none.

    Files are read if they have one of the suffixes `endings` or are in `read`.
    """
    path = Path(storage.matching(source))
    if not path.is_dir():
        return ""
    listed = walk(path)
    chosen = {*_ending(listed.files, endings), *read}
    if others := [file for file in listed.files if file not in chosen]:
        # A file that is not read may be a link to a file that is read. It is then not counted.
        seen = {os.path.realpath(file) for file in chosen}
        others = [file for file in others if os.path.realpath(file) not in seen]
    unread = Counter(map(_unread, others))
    unread.update(reason for _, reason in listed.missed)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in unread.most_common())
    return f"{path} contains files that are not read: {counts}" if counts else ""


def _unread(file: Path) -> str:
    """Returns the category under which an unread file is counted."""
    if not file.stat().st_size:
        return "empty"
    return f"*{file.suffix}" if file.suffix else "no suffix"


class TfdsData(NamedTuple):
    """A split of a TensorFlow dataset: examples, as dicts from feature to value, and file paths."""

    examples: Sequence[dict[str, Any]]
    filepaths: list[str]


def tfds_data(source: str) -> TfdsData:
    """Opens `tfds:NAME[/CONFIG][:VERSION]/SPLIT` without TensorFlow, and downloads nothing."""
    name, slash, split = source.removeprefix("tfds:").rpartition("/")
    if not slash:
        raise DataError(f"{source} names no split; write {source}/train")
    # Importing the library takes half a second, so only users of TensorFlow datasets import it.
    import tensorflow_datasets as tfds

    try:
        examples = tfds.data_source(name, split=split, download=False)
        filepaths = [str(path) for path in examples.dataset_info.splits[split].filepaths]
    except (KeyError, ValueError, NotImplementedError, OSError) as error:
        reason = (str(error.args[0]) if error.args else str(error)).strip().partition("\n")[0]
        raise DataError(
            f"{source} cannot be read ({reason}); if it is not prepared yet, run "
            f"`tfds build {name} --file_format=array_record`, or, for data with summaries, "
            "`python -m brt.prepare --pairs=KIND`"
        ) from error
    return TfdsData(examples, filepaths)


def _corpus_files(source: str, endings: Sequence[str]) -> list[File]:
    directory = CORPORA / source.removeprefix("corpus:")
    inside = directory.resolve().is_relative_to(CORPORA.resolve())
    paths = _of_corpora(_ending(directory.glob("*"), endings)) if inside else []
    if not paths:
        every = _of_corpora(_ending(CORPORA.rglob("*"), endings))
        known = sorted({path.parent for path in every})
        names = ", ".join(f"corpus:{path.relative_to(CORPORA).as_posix()}" for path in known)
        raise DataError(f"{source} does not exist; there are {names}")
    return [File(f"{source}/{path.name}", path) for path in paths]


def _path_files(path: Path, endings: Sequence[str]) -> list[File]:
    if path.is_file():
        return [File(str(path), path)]
    if not path.is_dir():
        raise DataError(f"{path} is neither a file nor a directory; write its output to a file")
    paths = _ending(walk(path).files, endings)
    if not paths:
        raise _nothing(path, endings)
    return _once([File(str(p), p) for p in paths])


def _nothing(path: Path, endings: Sequence[str]) -> DataError:
    """Returns an error which says that a directory has no file that can be read."""
    listed = walk(path)
    kinds = " or ".join(f"*{ending}" for ending in endings)
    if tuple(endings) == DOCUMENTS:
        kinds = f"*{TEXT[0]}, *{TEXT[1]} or other text, *.jsonl or *.parquet"
    found = Counter([*map(_unread, listed.files), *(reason for _, reason in listed.missed)])
    but = ", ".join(f"{count:,} {kind}" for kind, count in found.most_common())
    but = f", but {but}" if but else ""
    remedy = _remedy(path, listed.files, tuple(endings) == DOCUMENTS)
    if (path / "corpus.json").exists():
        remedy = f"set Data.store = '{path}'"
    return DataError(f"the directory {path} has no {kinds} file{but}; {remedy}")


def _remedy(path: Path, files: Sequence[Path], any_text: bool) -> str:
    """Returns a phrase that says what a user may do if no file of a directory is read."""
    examples = {_unread(file): file for file in files if file.stat().st_size}
    for file in examples.values():
        try:
            next(contents.text(File(str(file), file)))
        except BadRecord as error:
            return str(error)
    text = next((kind for kind in examples if kind not in ("*.json", "no suffix")), "")
    if any_text and text:
        return f"if they are text, name them as '{path}/{text}'"
    return "name another directory, or write the texts to a .jsonl file"


def _ending(paths: Iterable[Path], endings: Sequence[str]) -> list[Path]:
    """Returns the files that are not empty and have one of the suffixes, sorted."""
    # A .json file that contains a single object, such as a package.json, has no records and is left
    # out, unless it contains questions in the format of SQuAD and these are wanted.
    every = tuple(ending + packed for ending in endings for packed in ("", *formats.COMPRESSED))
    matching = (p for p in paths if p.name.lower().endswith(every) and p.is_file())
    matching = (p for p in matching if p.stat().st_size)
    if ".jsonl" in endings:
        part = b'"paragraphs"' if tuple(endings) == formats.QUESTIONS else None
        matching = (
            p
            for p in matching
            if formats.kind(p.name) != "json" or contents.holds_records(File(str(p), p), part)
        )
    return sorted(matching)


def _of_corpora(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.name != "README.md"]
