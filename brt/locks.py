"""Locks open files. The operating system releases a lock when its process ends for any reason."""

import errno
import fcntl
from typing import IO


def acquire(file: IO | int, *, wait: bool = False) -> bool:
    """Locks a file for this process and for child processes that inherit the open file.

    The lock ends when all of these processes have closed the file. Returns False if the file system
    has no locks. Without `wait`, BlockingIOError says that another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        return False
    return True
