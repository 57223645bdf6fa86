"""Locks on open files; the system lets go of them however a process ends."""

import errno
import fcntl
from typing import IO


def acquire(file: IO | int, *, wait: bool = False) -> bool:
    """Locks a file for this process and those that inherit it, until all have closed it.

    Args:
      wait: until nobody else has it.

    Returns:
      Whether it is locked; False on a file system without locks.

    Raises:
      BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        return False
    return True
