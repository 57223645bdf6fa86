"""The directory in which brt keeps what it can make again: the user's own, from the environment.

No config says where compiled programs are, because a config may come with a run that somebody else
made, and programs are executed.
"""

import errno
import functools
import os
import stat
import sys
import tempfile
from pathlib import Path


def directory() -> Path | None:
    """$XDG_CACHE_HOME/brt or ~/.cache/brt; None where the user has no home directory.

    A relative $XDG_CACHE_HOME does not count, as the XDG specification says. Nothing is created.
    """
    place = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(place):
        place = os.path.expanduser("~/.cache")  # which stays as it is where there is no home
    return Path(place, "brt") if os.path.isabs(place) else None


def private(name: str) -> Path | None:
    """The directory `name` in `directory`, made if need be, for programs that will be executed.

    None where it cannot be written, belongs to another user, or could have been written by
    others; stderr says so once.
    """
    try:
        place = _written() / name
        make(place)
        why = _others(place)
    except OSError as error:
        why = _nothing_kept(error)
    if why:
        _say(why)
    return None if why else place


def writable() -> Path:
    """`directory`, made if need be, for data whose content is checked when they are read.

    Where it cannot be written it is a temporary directory, which is gone with this process;
    stderr says so once.
    """
    try:
        return _written()
    except OSError as error:
        _say(_nothing_kept(error))
    return Path(_temporary().name)


def make(place: Path) -> None:
    """Makes a directory and those above it, where nobody but the user may list or write.

    Raises:
      OSError: one cannot be made.
    """
    for path in (*reversed(place.parents), place):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def _written() -> Path:
    if not (found := directory()):
        raise FileNotFoundError(errno.ENOENT, "the user has no home directory")
    make(found)
    tempfile.TemporaryFile(dir=found).close()
    return found


def _others(place: Path) -> str:
    """What other users could have done to programs in a directory of `directory`, "" if nothing."""
    for path in (place.parent, place):
        status = path.stat()
        if status.st_uid != os.geteuid():
            return f"compiled programs are not kept, as {path} belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"compiled programs are not kept, as others write to {path}; chmod go-w {path}"
    for path in place.resolve().parents:
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"compiled programs are not kept, as every user can write to {path}"
    return ""


def _nothing_kept(error: OSError) -> str:
    return (
        f"nothing is kept for later commands ({directory() or '~/.cache'}: {error.strerror}); "
        "XDG_CACHE_HOME can name another directory"
    )


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="brt-")


@functools.cache  # each sentence once
def _say(text: str) -> None:
    print(f"brt: {text}", file=sys.stderr, flush=True)
