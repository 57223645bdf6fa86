"""Writes files atomically and durably: they are never half written and survive a power failure.

A file is written under a random name and then renamed. Symbolic links are not followed, except in
the path of the directory that the user named, so that nobody can redirect a write.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from brt.errors import ConfigError
from brt.formatting import size


def acquire_lock(file: IO | int, *, wait: bool = False) -> bool:
    """Locks a file for this process and for child processes that inherit the open file.

    The lock ends when all of these processes have closed the file. Returns False if the file system
    has no locks, else True. If another process has the lock, the function waits for it or, if
    `wait` is False, raises BlockingIOError.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        return False
    return True


_FULL = {errno.ENOSPC, errno.EDQUOT}
_FAILING = _FULL | {errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PARTIAL = re.compile(r"\.brt\.[0-9a-f]{16}\.partial")
# A file needs an inode, so a disk is also full if no inodes are left. When the free inodes are
# counted, a failed save has already deleted its files (about _FEW_FILES for a checkpoint), and
# their inodes are free again. Inodes therefore count as used up if fewer than _FEW_FILES of them,
# or less than the share _FULL_SHARE of all inodes, are free.
_FULL_SHARE = 0.01
_FEW_FILES = 32
# If a write failed because the disk was full, but more than this share of the disk's space and of
# its inodes is free, the likely reason is a quota that is used up.
_FREE_SHARE = 0.1


def is_full(error: BaseException) -> bool:
    """Returns True if an error means that the disk is full or a quota is used up."""
    return getattr(error, "errno", None) in _FULL


def storage_fails(error: BaseException) -> bool:
    """Returns True if an error means that the storage is full or fails; a later try may succeed."""
    return getattr(error, "errno", None) in _FAILING


def storage_refuses(error: BaseException) -> bool:
    """Returns True if the storage has failed, or denies access that it has allowed before."""
    return storage_fails(error) or isinstance(error, PermissionError)


def remedy(error: BaseException) -> str:
    return "make room there" if is_full(error) else "see to the disk"


def _space(directory: Path) -> os.statvfs_result | None:
    """Returns the sizes of a disk and how much is free; None if the system does not say."""
    try:
        return os.statvfs(nearest_existing(directory))
    except OSError:
        return None


def describe_shortage(directory: Path, error: BaseException) -> str:
    """Returns a phrase that says which resource is used up: bytes, inodes or a quota."""
    if getattr(error, "errno", None) == errno.EDQUOT:
        return "the quota of the disk is used up"
    if (status := _space(directory)) and status.f_files:
        few = status.f_favail < max(_FEW_FILES, _FULL_SHARE * status.f_files)
        if few and status.f_favail / status.f_files < status.f_bavail / max(status.f_blocks, 1):
            return "no inodes are left for more files on the disk"
    return "the disk is full"


def free_space(directory: Path, error: BaseException) -> str:
    """Returns a phrase that says how much space is free, and whether a quota may be used up."""
    if not (status := _space(directory)):
        return "nothing says how much is free"
    free = f"{size(status.f_bavail * status.f_frsize)} were free"
    much = (
        status.f_bavail > _FREE_SHARE * status.f_blocks
        and status.f_favail > _FREE_SHARE * status.f_files
    )
    quota = getattr(error, "errno", None) == errno.EDQUOT
    return f"perhaps a quota is used up, for {free}" if much and not quota else free


def describe_error(error: OSError) -> str:
    """Returns a sentence about an error of the storage, with the path and what the user can do."""
    where = error.filename and os.fsdecode(error.filename)
    if not is_full(error):
        what = f"{where or 'a file'} cannot be read or written: {error.strerror}"
        return f"{what}; see to the disk, and run the same command again"
    full = describe_shortage(Path(where), error) if where else "the disk is full"
    at = f" at {where}" if where else ""
    return f"{full}{at}; free some space and run the same command again"


def nearest_existing(path: Path) -> Path:
    """Returns the path, or its nearest parent directory that exists."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))


def write(path: Path, content: bytes, *, below: Path | None = None) -> None:
    """Replaces the content of a file atomically, or creates the file; see `replacing`."""
    with replacing(path, below=below) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, *, below: Path | None = None, synced: bool = True) -> Iterator[BinaryIO]:
    """Context that yields a new file for bytes, which replaces `path` if the block succeeds.

    If the block fails, the new file is deleted. The permissions of an existing file are kept.
    If `synced` is True, the context ends when the content and the name of the file are on the disk.

    In this module, an argument `below` is a directory that contains `path`; None stands for the
    directory of `path`. In `path`, only `below` and its parents may be symbolic links; OSError with
    ELOOP is raised for other links.
    """
    with directory(path.parent, below=below) as place:
        mode = 0o666
        if status := _found(path, place):
            mode = stat.S_IMODE(status.st_mode) & 0o777
        name, descriptor = _new_file(place, mode)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if synced:
                    os.fsync(descriptor)
            os.replace(name, path.name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with contextlib.suppress(OSError):  # The user needs to see only the first error.
                os.unlink(name, dir_fd=place)
            raise
        if synced:
            os.fsync(place)


@contextlib.contextmanager
def named_by_user(path: Path) -> Iterator[BinaryIO]:
    """Context that yields a file for writing bytes to a path that the user named.

    A new or regular file, or the target of a link, is replaced at the end, as by `replacing`.
    Anything else, such as a FIFO, a device or standard output, is written directly.
    """
    descriptor = _stream(path)
    if descriptor is None:
        with replacing(Path(os.path.realpath(path))) as file:
            yield file
    else:
        with open(descriptor, "wb") as file:
            yield file


def is_regular_or_new(path: Path) -> bool:
    """Returns True if `path` is a regular file or does not exist yet (see `named_by_user`)."""
    return not path.exists() or path.is_file()


def utf8_path(path: Path) -> Path:
    """Returns `path`, a directory for checkpoints. Raises ConfigError if the path is not UTF-8,
    because TensorStore requires UTF-8.
    """
    try:
        os.path.abspath(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the name of the run directory {path.parent} is not UTF-8, which checkpoints need; "
            "rename it or its parents, or name another directory"
        ) from error
    return path


def open_file(path: Path, mode: str, *, below: Path | None = None, buffering: int = -1) -> IO:
    """Opens a regular file for changes and returns it, like Python's `open`; text is UTF-8.

    OSError is raised for links and for files that are not regular; see `replacing` for `below`.
    """
    with directory(path.parent, below=below) as place:

        def opener(name: str, flags: int) -> int:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
            return os.open(path.name, flags, 0o666, dir_fd=place)

        status = _found(path, place)
        if status and stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if status and not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        # Texts may contain file names that are not UTF-8, whose bytes are written as escapes.
        encoding, errors = (None, None) if "b" in mode else ("utf-8", "backslashreplace")
        return open(path, mode, buffering, encoding, errors, opener=opener)


@contextlib.contextmanager
def directory(path: Path, *, below: Path | None = None, make: bool = False) -> Iterator[int]:
    """Context that opens a directory and yields its file descriptor.

    `below` is as in `replacing`, but None stands for `path` itself. If `make` is True, missing
    directories below `below` are created.
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
    """Returns a random name for a temporary file, which nobody can predict."""
    return f".brt.{secrets.token_hex(8)}.partial"


def partial_files(directory: Path) -> Iterator[Path]:
    """Yields the temporary files in a directory. Killed processes may have left them there."""
    return (path for path in directory.glob(".brt.*.partial") if _PARTIAL.fullmatch(path.name))


def remove_abandoned(directory: Path) -> None:
    """Deletes temporary files in a directory, except files that a process is writing."""
    for path in partial_files(directory):
        # An OSError is no problem: the file may be in use, belong to another user, be a link, or no
        # longer exist.
        with contextlib.suppress(OSError), open_file(path, "r+b") as file:
            if acquire_lock(file):
                path.unlink()


def links(directory: Path) -> Iterator[Path]:
    """Yields the symbolic links below a directory, without following any."""
    for place, directories, names in os.walk(directory):
        paths = (Path(place, name) for name in (*directories, *names))
        yield from (path for path in paths if path.is_symlink())


def sync_tree(directory: Path) -> None:
    """Flushes all files below a directory and their names to the disk."""
    for place, _, names in os.walk(directory):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def sync(path: Path) -> None:
    """Flushes a file to the disk, or the added and removed names if the path is a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_file(place: int, mode: int) -> tuple[str, int]:
    """Creates a temporary file, locked so that nobody deletes it; returns (name, descriptor)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        name = partial_name()
        descriptor = os.open(name, flags, mode, dir_fd=place)
        # Before this process locks the new file, another process may lock it in `remove_abandoned`
        # and delete it. Then the loop creates another file.
        with contextlib.suppress(BlockingIOError):
            acquire_lock(descriptor)
            if os.fstat(descriptor).st_nlink:
                return name, descriptor
        os.close(descriptor)


def _found(path: Path, place: int) -> os.stat_result | None:
    """Returns the status of the file at `path`, whose directory is open as `place`; refuses links.

    The result is None if there is no such file.
    """
    try:
        status = os.stat(path.name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    return status


def _make(path: Path, place: int, *, last: bool) -> None:
    """Creates the directory at `path`, whose parent is open as `place`, unless it exists.

    `last` is True for the directory that the caller asks for, and False for its parents. If it is
    True and a file has this path, FileExistsError is raised.
    """
    try:
        os.mkdir(path.name, dir_fd=place)
    except FileExistsError:
        status = _found(path, place)
        if last and status and not stat.S_ISDIR(status.st_mode):
            raise


def _stream(path: Path) -> int | None:
    """Returns a descriptor for writing if `path` is a standard stream, a FIFO or a device, or else
    None.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    for standard in (sys.stdout, sys.stderr):
        # A stream that is closed, or that is no file, raises an error.
        with contextlib.suppress(OSError, ValueError):
            if os.path.samestat(status, os.fstat(standard.fileno())):
                standard.flush()  # Text that was printed before must come first.
                return os.dup(standard.fileno())
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return None
    return os.open(path, os.O_WRONLY | os.O_NOCTTY)
