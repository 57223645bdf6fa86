"""Files that are what their hashes say: each is read once, and again when somebody touched it.

An empty file in the cache remembers what the file system said of one when that was done.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from brt import user_cache
from brt.data import sources

SETTLED = 1.0  # seconds after which another change to a file changes its time


def check(directory: Path, hashes: Mapping[str, str], *, whole: bool = False) -> None:
    """Compares files with their sha256.

    Args:
      whole: all of them; else those that are not known to be as they were.

    Raises:
      ValueError: names the one that differs.
      OSError: one cannot be read.
    """
    for name, expected in hashes.items():
        path = directory / name
        stat = path.stat()
        seal = _seal(expected, stat)
        if not whole and seal and os.path.exists(seal):
            continue
        found = sources.sha256(path)
        with contextlib.suppress(OSError):  # without a cache it is read each time
            if seal and found != expected:
                seal.unlink(missing_ok=True)
            elif seal and time.time() - stat.st_ctime > SETTLED:
                user_cache.make(seal.parent)
                seal.touch()
        if found != expected:
            raise ValueError(f"{name} has the sha256 {found[:12]}, not {expected[:12]}")


def _seal(expected: str, stat: os.stat_result) -> Path | None:
    """What is there where a file with this hash was found to be as it is; None without a cache."""
    if not (place := user_cache.directory()):
        return None
    said = (expected, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    return place / "verified" / hashlib.sha256(repr(said).encode()).hexdigest()
