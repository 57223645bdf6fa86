"""Compares files with their hashes, but reads each file again only if it has changed.

When a file had the right hash, an empty file in the cache is created. Its name is a hash of the
expected hash and of the file's size, times and inode, so any change of the file invalidates it.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from brt import user_cache
from brt.data import sources

# The number of seconds after which another change of a file surely changes its time stamp.
SETTLED = 1.0


def check(directory: Path, hashes: Mapping[str, str], *, whole: bool = False) -> None:
    """Raises ValueError if the SHA-256 of a file differs from the expected one.

    Args:
      directory: the directory of the files.
      hashes: the expected hash of each file.
      whole: True reads all files, also those that are known to be unchanged.

    Raises:
      ValueError: a file differs; the message names it.
      OSError: a file cannot be read.
    """
    for name, expected in hashes.items():
        path = directory / name
        stat = path.stat()
        seal = _seal(expected, stat)
        if not whole and seal and os.path.exists(seal):
            continue
        actual = sources.sha256(path)
        # If the cache cannot be written, the file is read again each time.
        with contextlib.suppress(OSError):
            if seal and actual != expected:
                seal.unlink(missing_ok=True)
            elif seal and time.time() - stat.st_ctime > SETTLED:
                user_cache.make(seal.parent)
                seal.touch()
        if actual != expected:
            raise ValueError(f"{name} has the sha256 {actual[:12]}, not {expected[:12]}")


def _seal(expected: str, stat: os.stat_result) -> Path | None:
    """Returns the path that exists if a file in this state was verified; None without a cache."""
    if not (place := user_cache.directory()):
        return None
    state = (expected, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    return place / "verified" / hashlib.sha256(repr(state).encode()).hexdigest()
