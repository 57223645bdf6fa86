"""Files that are never seen half written, and that a power cut does not take back."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path


def no_room(error: BaseException) -> bool:
    """Whether an error is that of a full disk, or of a quota that is used up."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def write(path: Path, content: bytes) -> None:
    """Replaces a file in one moment; raises OSError where that cannot be."""
    temporary = partial_name(path)
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def partial_name(path: Path) -> Path:
    """Of a file that is being written."""
    return path.with_name(f".{path.name}.partial")


def partial_files(directory: Path) -> Iterator[Path]:
    """What `write` left in a directory when it was killed; nothing where there is no directory."""
    return directory.glob(".*.partial")


def sync_tree(directory: Path) -> None:
    """Makes all files below a directory durable, and their names."""
    for place, _, names in os.walk(directory):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def sync(path: Path) -> None:
    """Makes a file durable; of a directory, what was created, renamed or removed there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
