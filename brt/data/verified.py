"""Compares files with their expected hashes; a file is read again only if it has changed.

After a file was found to have the right hash, an empty file (the seal) is created in the cache. The
name of the seal is a hash of the file's expected hash, size, times and inode. After any change of
the file, the seal would have another name, so no seal is found and the file is read again.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from brt import user_cache
from brt.data import sources

# A seal is only created if this number of seconds has passed since the last change of the file.
# Another change then surely gives the file another time stamp.
SETTLED = 1.0


def check(directory: Path, hashes: Mapping[str, str], *, whole: bool = False) -> None:
    """Raises ValueError if a file of a directory has another SHA-256 than `hashes` says.

    `whole` reads all files, also those that are known to be unchanged.
    """
    for name, expected in hashes.items():
        path = directory / name
        stat = path.stat()
        seal = _seal(expected, stat)
        if not whole and seal and os.path.exists(seal):
            continue
        actual = sources.sha256(path)
        # Errors are ignored, because without a seal, the file is only read again next time.
        with contextlib.suppress(OSError):
            if seal and actual != expected:
                seal.unlink(missing_ok=True)
            elif seal and time.time() - stat.st_ctime > SETTLED:
                user_cache.make(seal.parent)
                seal.touch()
        if actual != expected:
            raise ValueError(f"{name} has the sha256 {actual[:12]}, not {expected[:12]}")


def _seal(expected: str, stat: os.stat_result) -> Path | None:
    """Returns the path of a file's seal; None without a cache."""
    if not (place := user_cache.directory()):
        return None
    state = (expected, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    return place / "verified" / hashlib.sha256(repr(state).encode()).hexdigest()
