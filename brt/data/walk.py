"""Lists the files below a directory, and the entries that cannot be read.

Links to directories are followed. Each directory is visited only once, even if links form cycles.
Hidden files and directories are skipped.
"""

import os
from pathlib import Path
from typing import NamedTuple

DEAD = "links to nothing"
CLOSED = "directories that cannot be read"
ODD = "neither files nor directories"


class File(NamedTuple):
    """A file: its path, and the name by which messages and documents refer to it."""

    name: str
    path: Path


class Walk(NamedTuple):
    """The content of a directory and its subdirectories."""

    files: list[Path]  # regular files, sorted by path
    missed: list[tuple[Path, str]]  # paths that cannot be read, with `DEAD`, `CLOSED` or `ODD`


def walk(top: Path) -> Walk:
    """Returns all files below the directory `top`, and the entries that cannot be read.

    Directories are visited before links to directories, so that the path of a file contains links
    only if the file cannot be reached without links.
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
            # Path.is_dir might raise an error, which os.path.isdir never does.
            if os.path.isdir(path):
                (links if os.path.islink(path) else places).append(path)
            elif os.path.isfile(path):
                result.files.append(path)
            else:
                result.missed.append((path, DEAD if os.path.islink(path) else ODD))
    result.files.sort()
    return result
