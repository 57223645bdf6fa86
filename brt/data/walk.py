"""The files below a directory, and what a listing of it cannot see.

Links to directories are followed, as `**` in a pattern follows them; each directory is read once,
though links lead in circles. Hidden files and directories are left out.
"""

import os
from pathlib import Path
from typing import NamedTuple

DEAD = "links to nothing"
CLOSED = "folders that cannot be read"
ODD = "neither files nor folders"


class File(NamedTuple):
    """A file and the name under which it is reported."""

    name: str
    path: Path


class Walk(NamedTuple):
    """What is below a directory.

    Attributes:
      files: regular files, in order of their paths.
      missed: everything that is there and cannot be read, with the reason: `DEAD`, `CLOSED`, `ODD`.
    """

    files: list[Path]
    missed: list[tuple[Path, str]]


def walk(top: Path) -> Walk:
    """Looks at everything below `top`; directories before links to them, so that names stay."""
    found = Walk([], [])
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
            found.missed.append((place, CLOSED))
            continue
        for path in (place / name for name in names):
            if os.path.isdir(path):  # not Path's, which may raise
                (links if os.path.islink(path) else places).append(path)
            elif os.path.isfile(path):
                found.files.append(path)
            else:
                found.missed.append((path, DEAD if os.path.islink(path) else ODD))
    found.files.sort()
    return found
