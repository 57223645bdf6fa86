"""Shares the files of frozen arrays, which no training step changes, between checkpoints of a run.

The frozen arrays of a checkpoint are in its directory `frozen`, and all other arrays in its
directory `state`. The files in `frozen` are hard links to the files of the previous checkpoint, so
that the frozen arrays take disk space only once. Every checkpoint nevertheless is a complete
directory, which can be copied or deleted on its own.
"""

import errno
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from brt.checkpointing import manifest, reader
from brt.errors import CheckpointError

# A file system reports one of these errors if it has no hard links, if it cannot link the two
# directories, or if the file to link has been removed.
_NO_LINKS = {
    errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK,
    errno.EXDEV, errno.ENOENT,
}  # fmt: skip


def link(directory: Path, step: int, names: Collection[str], target: Path) -> dict[str, str] | None:
    """Links the files of the frozen arrays of the checkpoint `step` into a new checkpoint.

    Returns the SHA-256 checksum of each linked file, by its path in the checkpoint; None if the
    arrays have to be written, because the frozen arrays of the earlier checkpoint are not exactly
    `names`, or because its files cannot be linked. OSError is raised if the disk is full or fails.
    """
    source = directory / str(step)
    try:
        if set(reader.read_meta(directory, step).get("frozen", ())) != set(names):
            return None
        known = manifest.read(source)
        files = [path for path in sorted((source / reader.FROZEN).rglob("*")) if path.is_file()]
        checksums = {path.relative_to(source).as_posix(): path for path in files}
        if any(path.is_symlink() for path in files) or not checksums.keys() <= known.keys():
            return None
        for name, path in checksums.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target / name)
    except (CheckpointError, ValueError):
        return None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.rmtree(target / reader.FROZEN, ignore_errors=True)
        return None
    return {name: known[name] for name in checksums} or None
