"""Files that are never seen half written and that a power cut does not take back.

A file is written under an unpredictable name of its own and then renamed. No link is followed on
the way, but in the path of the directory that the user named.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from brt import locks
from brt.formatting import size

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FAILING = _FULL | {errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PARTIAL = re.compile(r"\.brt\.[0-9a-f]{16}\.partial")
_NEARLY = 0.01  # of a disk that is left where it counts as full
_FEW_FILES = 32  # of a checkpoint at least, some of which go again when one cannot be made
_MUCH = 0.1  # of one that is left where something else must be full


def no_room(error: BaseException) -> bool:
    """Whether an error is that of a full disk, or of a quota that is used up."""
    return getattr(error, "errno", None) in _FULL


def storage_fails(error: BaseException) -> bool:
    """Whether an error is of the storage, so that the same command will do when that is mended."""
    return getattr(error, "errno", None) in _FAILING


def storage_refuses(error: BaseException) -> bool:
    """Whether the storage fails, or denies access that it granted before the work began."""
    return storage_fails(error) or isinstance(error, PermissionError)


def remedy(error: BaseException) -> str:
    """What to do about an error of the storage."""
    return "make room there" if no_room(error) else "see to the disk"


def shortage(directory: Path, error: BaseException) -> str:
    """What is used up where an error says that there is no room: bytes, inodes, or a quota."""
    if getattr(error, "errno", None) == errno.EDQUOT:
        return "the quota of the disk is used up"
    try:
        found = os.statvfs(existing(directory))
    except OSError:
        return "the disk is full"
    bytes_left = found.f_bavail / max(found.f_blocks, 1)
    files_left = found.f_favail / found.f_files if found.f_files else 1.0
    few = found.f_favail < max(_FEW_FILES, _NEARLY * found.f_files)
    if few and files_left < bytes_left:
        return "no inodes are left for more files on the disk"
    return "the disk is full"


def room(directory: Path, error: BaseException) -> str:
    """How much is free where an error says that there is no room, and what else may be used up."""
    try:
        found = os.statvfs(existing(directory))
    except OSError:
        return "nothing says how much is free"
    free = f"{size(found.f_bavail * found.f_frsize)} were free"
    much = found.f_bavail > _MUCH * found.f_blocks and found.f_favail > _MUCH * found.f_files
    quota = getattr(error, "errno", None) == errno.EDQUOT
    return f"perhaps a quota is used up, for {free}" if much and not quota else free


def existing(path: Path) -> Path:
    """A path, or the nearest of its parents that is there."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))


def write(path: Path, content: bytes, *, below: Path | None = None) -> None:
    """Replaces a file in one moment; raises as `replacing` does."""
    with replacing(path, below=below) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, *, below: Path | None = None, synced: bool = True) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends well; else nothing is left.

    Args:
      path: a file, which keeps its mode, or a name for a new one.
      below: a directory under which no part of `path` may be a link; None: that of `path`.
      synced: whether the file and its name are on the disk when this returns.

    Raises:
      OSError: the file cannot be written; ELOOP where a part of `path` is a link.
    """
    with directory(path.parent, below=below) as place:
        mode = 0o666
        if found := _found(path, place):
            mode = stat.S_IMODE(found.st_mode) & 0o777
        name, descriptor = _new_file(place, mode)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if synced:
                    os.fsync(descriptor)
            os.replace(name, path.name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to be raised
                os.unlink(name, dir_fd=place)
            raise
        if synced:
            os.fsync(place)


@contextlib.contextmanager
def named_by_user(path: Path) -> Iterator[BinaryIO]:
    """A file that the user named, to be written; raises as `replacing` does.

    A regular file is replaced as `replacing` does, and so is one that `path` is a link to. Into
    anything else, as a FIFO, a device or what standard output is, the bytes are written.
    """
    descriptor = _stream(path)
    if descriptor is None:
        with replacing(Path(os.path.realpath(path))) as file:
            yield file
    else:
        with open(descriptor, "wb") as file:
            yield file


def is_regular_or_new(path: Path) -> bool:
    """Whether `named_by_user` replaces a file, in place of writing into one."""
    return not path.exists() or path.is_file()


def open_file(path: Path, mode: str, *, below: Path | None = None, buffering: int = -1) -> IO:
    """Opens a regular file to change it, as `open` does; in UTF-8 where it is text.

    Args:
      below: as `replacing` has it.

    Raises:
      OSError: it cannot be opened, a part of `path` is a link, or it is no regular file.
    """
    with directory(path.parent, below=below) as place:

        def opener(name: str, flags: int) -> int:
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would wait for its other end
            return os.open(path.name, flags, 0o666, dir_fd=place)

        found = _found(path, place)
        if found and stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if found and not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        encoding = None if "b" in mode else "utf-8"
        return open(path, mode, buffering, encoding=encoding, opener=opener)


@contextlib.contextmanager
def directory(path: Path, *, below: Path | None = None, make: bool = False) -> Iterator[int]:
    """A descriptor of a directory; raises as `replacing` does.

    Args:
      below: as `replacing` has it; it has to be there.
      make: makes what is missing under `below`.
    """
    at = below or path
    with contextlib.ExitStack() as stack:
        place = os.open(at, _DIRECTORY)
        stack.callback(os.close, place)
        for part in path.relative_to(at).parts:
            at /= part
            if make:
                _make(at, place, last=at == path)
            _found(at, place)
            place = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            stack.callback(os.close, place)
        yield place


def partial_name() -> str:
    """A new name of a file that goes soon, which nobody can foresee."""
    return f".brt.{secrets.token_hex(8)}.partial"


def partial_files(directory: Path) -> Iterator[Path]:
    """Files with such names that a killed process left; nothing where there is no directory."""
    return (path for path in directory.glob(".brt.*.partial") if _PARTIAL.fullmatch(path.name))


def remove_abandoned(directory: Path) -> None:
    """Removes such files that nobody writes any more, where that can be done."""
    for path in partial_files(directory):
        # Somebody is writing it, it is another user's, a link, or gone by now.
        with contextlib.suppress(OSError), open_file(path, "r+b") as file:
            if locks.acquire(file):
                path.unlink()


def links(directory: Path) -> Iterator[Path]:
    """The links below a directory, none of which is followed."""
    for place, directories, names in os.walk(directory):
        paths = (Path(place, name) for name in (*directories, *names))
        yield from (path for path in paths if path.is_symlink())


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


def _new_file(place: int, mode: int) -> tuple[str, int]:
    """A file in a directory that is locked as long as it is open: `remove_abandoned` leaves it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        name = partial_name()
        descriptor = os.open(name, flags, mode, dir_fd=place)
        with contextlib.suppress(BlockingIOError):  # who cleans up was faster, and removes it
            locks.acquire(descriptor)
            if os.fstat(descriptor).st_nlink:
                return name, descriptor
        os.close(descriptor)


def _found(path: Path, place: int) -> os.stat_result | None:
    """What has the name of `path` in a directory; None where nothing has, OSError for a link."""
    try:
        found = os.stat(path.name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    return found


def _make(path: Path, place: int, *, last: bool) -> None:
    """Makes a directory where there is none; FileExistsError where the last one is a file."""
    try:
        os.mkdir(path.name, dir_fd=place)
    except FileExistsError:
        found = _found(path, place)
        if last and found and not stat.S_ISDIR(found.st_mode):
            raise


def _stream(path: Path) -> int | None:
    """A descriptor of what is no regular file, or is a standard stream; None for other files."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    for standard in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it is closed, or no file of the system
            if os.path.samestat(found, os.fstat(standard.fileno())):
                standard.flush()  # what was printed before comes first
                return os.dup(standard.fileno())
    if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
        return None
    return os.open(path, os.O_WRONLY | os.O_NOCTTY)
