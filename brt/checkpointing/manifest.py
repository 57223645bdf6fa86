"""Writes and verifies MANIFEST.sha256, the checksums of all files of a checkpoint.

The command `sha256sum` writes and reads the same format. The checksums are needed because the
library that stores the arrays notices missing files, but not flipped bits.
"""

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from brt import durable, untrusted

NAME = "MANIFEST.sha256"
# Besides its arrays, a checkpoint has at most this many bytes, such as the metadata of its arrays.
_OTHERS = 64 << 20
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


def write(directory: Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes MANIFEST.sha256 for all files below `directory`, and flushes all files to disk.

    Files with a `known` checksum, by the path relative to `directory`, are not read.
    """
    lines = []
    for path in files(directory):
        name = path.relative_to(directory).as_posix()
        digest = known.get(name)
        if digest is None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {name}\n")
    (directory / NAME).write_text("".join(lines))
    durable.sync_tree(directory)


def verify(
    directory: Path, only: Collection[str] | None = None, *, arrays: int | None = None
) -> list[str]:
    """Compares a checkpoint with its MANIFEST.sha256; returns a phrase for each problem.

    Only files whose relative paths are in `only` are read (None: all), and none if the files have
    far more bytes than the `arrays` of the checkpoint (None: not known).
    """
    try:
        expected = read(directory)
    except ValueError as error:
        return [str(error)]
    found = sum(map(_size, files(directory)))
    if arrays is not None and found > 2 * arrays + _OTHERS:
        return [f"it has {found:,} bytes for arrays of {arrays:,}"]
    present = {path.relative_to(directory).as_posix(): path for path in files(directory)}
    problems = [f"{name} is missing" for name in expected if name not in present]
    problems += [f"{name} is not in {NAME}" for name in present if name not in expected]
    for name in sorted(expected.keys() & present.keys() & {*(only or present)}):
        problems += _verify_file(present[name], name, expected[name])
    return problems


def read(directory: Path) -> dict[str, str]:
    """Returns the checksum (hexadecimal) of each file that MANIFEST.sha256 lists, by relative path.

    ValueError is raised if the manifest is missing or damaged; the message says how.
    """
    try:
        text = untrusted.read_file(directory / NAME).decode("ascii")
    except FileNotFoundError as error:
        raise ValueError(f"{NAME} is missing") from error
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{NAME} is damaged: it is not plain text") from error
    checksums: dict[str, str] = {}
    for number, line in enumerate(filter(None, re.split(r"(?<=\n)", text)), start=1):
        match = _LINE.fullmatch(line.removesuffix("\n"))
        if not match or not line.endswith("\n") or match[2] in checksums:
            raise ValueError(f"{NAME} is damaged: line {number} is not 'sha256  path'")
        checksums[match[2]] = match[1]
    return checksums


def files(directory: Path) -> list[Path]:
    """Returns the paths of all files of a checkpoint except the manifest; links count as files."""
    paths = [
        Path(root) / name
        for root, directories, names in os.walk(directory)
        for name in [*names, *(d for d in directories if (Path(root) / d).is_symlink())]
    ]
    return sorted(path for path in paths if path != directory / NAME)


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # A trainer may have removed the file.
        return 0


def _verify_file(path: Path, name: str, expected: str) -> list[str]:
    if path.is_symlink():
        return [f"{name} is a symbolic link"]
    try:
        with untrusted.open_file(path) as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return [f"{name} cannot be read ({error.strerror})"]
    if actual == expected:
        return []
    return [f"{name} is damaged: sha256 {actual[:12]}, expected {expected[:12]}"]
