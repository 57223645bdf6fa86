"""From the name of a source to the files behind it, and their hashes.

    books/a.txt  books/  'books/*.txt'   a file, a directory (its text, recursively), a glob
    corpus:novels/train                  a corpus that comes with brt
    tfds:NAME[/CONFIG][:VERSION]/SPLIT   a prepared TensorFlow dataset, in ArrayRecord format
    memory:copy/train/1000?distance=96   made up: see `brt.data.memory.names`

Any text or JSONL file may be compressed (.gz, .xz, .zst).
"""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.config.fields import MEMORY
from brt.data.memory import names
from brt.errors import DataError

CORPORA = Path(__file__).parent / "corpora"
COMPRESSED = (".gz", ".xz", ".zst")
TEXT = (  # prose, its markup, and source code
    ".txt", ".md", ".rst", ".tex", ".org", ".adoc", ".py", ".pyi", ".c", ".h", ".cc", ".cpp",
    ".hpp", ".cu", ".cs", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs",
    ".swift", ".rb", ".php", ".pl", ".lua", ".sh", ".sql", ".r", ".jl", ".hs", ".ml", ".f90",
)  # fmt: skip


class File(NamedTuple):
    """A file and the name under which it is reported."""

    name: str
    path: Path


class FileHash(NamedTuple):
    """What tells one content from another."""

    name: str
    bytes: int
    sha256: str


def files(source: str, endings: Sequence[str] = TEXT) -> list[File]:
    """The files behind `source`, in reading order.

    Args:
      endings: of the files that are taken out of directories; hidden and empty ones are not.

    Raises:
      DataError: there is none.
    """
    if source.startswith("corpus:"):
        return _corpus_files(source, endings)
    if source.startswith(MEMORY):
        novels = names.parse(source).novels
        return _corpus_files(novels, endings) if novels else []
    if source.startswith("tfds:"):
        return [
            File(f"{source} {path.name}", path) for path in map(Path, tfds_data(source).filepaths)
        ]
    path = Path(source).expanduser()
    if os.path.exists(path):  # not Path's, to which a name may be too long
        return _path_files(path, endings)
    if not glob.has_magic(source):
        raise DataError(f"{source} does not exist")
    matches = sorted(set(_matches(str(path))))
    if not matches:
        raise DataError(f"the pattern {source} matches no file")
    found = [file for match in matches for file in _path_files(Path(match), endings)]
    once = {os.path.realpath(file.path): file for file in reversed(found)}
    return [file for file in found if once[os.path.realpath(file.path)] is file]


def _matches(pattern: str) -> Iterator[str]:
    """As glob has it; but `**` is each directory below once, though links lead in circles."""
    if os.path.basename(pattern) == "**":
        pattern = f"{pattern}/*"
    head, stars, tail = pattern.partition("**/")
    if not stars or (head and head[-1] != "/"):
        yield from glob.glob(pattern)
        return
    seen = set()
    for top in glob.glob(head) if head else ["."]:
        for place, inside, _ in os.walk(top, followlinks=True):
            real = os.path.realpath(place)
            inside[:] = sorted(n for n in inside if real not in seen and not n.startswith("."))
            if real not in seen:
                seen.add(real)
                below = os.path.join(glob.escape(place), tail)
                yield from _matches(below if head else below.removeprefix("./"))


def sha256(path: Path) -> str:
    """The hexadecimal sha256 of a file's content."""
    with untrusted.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(sources: Sequence[str], endings: Sequence[str] = TEXT) -> list[FileHash]:
    """Reads every file of `sources` once; a changed file has another hash."""
    return [hashed(file) for source in sources for file in files(source, endings)]


def hashed(file: File) -> FileHash:
    """Raises DataError where it cannot be read."""
    try:
        digest = sha256(file.path)
        return FileHash(file.name, file.path.stat().st_size, digest)
    except OSError as error:
        raise DataError(f"{file.name} cannot be read: {error.strerror}") from error


def left_out(source: str, endings: Sequence[str] = TEXT) -> str:
    """Which files of a directory are not read, in words; "" where all are, or it is none."""
    path = Path(source).expanduser()
    if not path.is_dir():
        return ""
    read = set(_ending(path.rglob("*"), endings))
    others = Counter(
        "empty" if not file.stat().st_size else f"*{file.suffix}" if file.suffix else "no suffix"
        for file in path.rglob("*")
        if file.is_file() and file not in read and not _hidden(file, path)
    )
    counts = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common())
    return f"of {path} these files are not read: {counts}" if counts else ""


class TfdsData(NamedTuple):
    """A split of a TensorFlow dataset: its examples and the files they lie in."""

    examples: Sequence[dict[str, Any]]
    filepaths: list[str]


def tfds_data(source: str) -> TfdsData:
    """Opens `tfds:NAME/SPLIT` without TensorFlow; downloads nothing."""
    name, slash, split = source.removeprefix("tfds:").rpartition("/")
    if not slash:
        raise DataError(f"{source} names no split; write {source}/train")
    import tensorflow_datasets as tfds  # half a second, and only this kind of source needs it

    try:
        examples = tfds.data_source(name, split=split, download=False)
        filepaths = [str(path) for path in examples.dataset_info.splits[split].filepaths]
    except (KeyError, ValueError, NotImplementedError, OSError) as error:
        reason = (str(error.args[0]) if error.args else str(error)).strip().partition("\n")[0]
        raise DataError(
            f"{source} cannot be read ({reason}); if it is not prepared yet, run "
            f"`tfds build {name} --file_format=array_record`, or, where there are summaries, "
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
        raise DataError(f"{path} is neither a file nor a directory; write what it gives to a file")
    paths = [p for p in _ending(path.rglob("*"), endings) if not _hidden(p, path)]
    if not paths:
        prepared = (path / "corpus.json").exists()
        remedy = f"set Data.store = '{path}'" if prepared else f"name its files, as '{path}/*.log'"
        kinds = " or ".join(f"*{ending}" for ending in endings)
        kinds = f"*{TEXT[0]}, *{TEXT[1]} or other text" if endings == TEXT else kinds
        raise DataError(f"the directory {path} has no {kinds} file; {remedy}")
    return [File(str(p), p) for p in paths]


def _ending(paths: Iterable[Path], endings: Sequence[str]) -> list[Path]:
    every = tuple(ending + packed for ending in endings for packed in ("", *COMPRESSED))
    return sorted(
        path
        for path in paths
        if path.name.lower().endswith(every) and path.is_file() and path.stat().st_size
    )


def _hidden(path: Path, directory: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(directory).parts)


def _of_corpora(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.name != "README.md"]
