"""Finds and creates the user's cache directory, for files that brt can create again.

Only environment variables determine the directory. No setting can do so, because the cache contains
compiled programs that brt executes, and a config may come with a run that somebody else made.
"""

import contextlib
import errno
import functools
import os
import stat
import tempfile
from pathlib import Path

from brt import output


def directory() -> Path | None:
    """Returns $XDG_CACHE_HOME/brt or ~/.cache/brt; None without a home directory. Creates nothing.

    A relative $XDG_CACHE_HOME is ignored, as the XDG specification says.
    """
    place = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(place):
        # Without a home directory, the ~ stays, and the path is not absolute.
        place = os.path.expanduser("~/.cache")
    return Path(place, "brt") if os.path.isabs(place) else None


def private(name: str) -> Path | None:
    """Creates and returns a cache directory for programs that brt will execute.

    Returns None if the directory cannot be written, belongs to another user, or can be written by
    other users. A message on stderr then gives the reason once.
    """
    try:
        place = _checked_writable() / name
        make(place)
        why = _warning_about_others(place)
    except OSError as error:
        why = _not_cached(error)
    if why:
        _say(why)
    return None if why else place


def writable() -> Path:
    """Creates and returns the cache directory, for data that brt verifies when it reads them.

    If it cannot be written, a message says so once, and a temporary directory is returned, which is
    deleted when the process ends.
    """
    try:
        return _checked_writable()
    except OSError as error:
        _say(_not_cached(error))
    return Path(_temporary().name)


def make(place: Path) -> None:
    """Creates a directory and its missing parents, with permissions for the user alone."""
    for path in (*reversed(place.parents), place):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def seal(kind: str, key: str, *, good: bool = True) -> None:
    """Notes in the cache that a file was found to be good; if `good` is False, removes the note.

    The note, a seal, is an empty file kind/key; `key` is a hash of what was checked. Errors are
    ignored, because without a seal, the file is only checked again.
    """
    with contextlib.suppress(OSError):
        if (place := directory()) and good:
            make(place / kind)
            (place / kind / key).touch()
        elif place:
            (place / kind / key).unlink(missing_ok=True)


def sealed(kind: str, key: str) -> bool:
    place = directory()
    return bool(place and os.path.exists(place / kind / key))


def _checked_writable() -> Path:
    """Creates and returns the cache directory; raises OSError if no file can be created in it."""
    if not (place := directory()):
        raise FileNotFoundError(errno.ENOENT, "the user has no home directory")
    make(place)
    tempfile.TemporaryFile(dir=place).close()
    return place


def _warning_about_others(place: Path) -> str:
    """Returns a warning if other users could have changed programs in a directory, or ""."""
    for path in (place.parent, place):
        status = path.stat()
        if status.st_uid != os.geteuid():
            return f"compiled programs are not cached, because {path} belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return (
                f"compiled programs are not cached, because others can write to {path}; run "
                f"chmod go-w {path}"
            )
    for path in place.resolve().parents:
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"compiled programs are not cached, because every user can write to {path}"
    return ""


def _not_cached(error: OSError) -> str:
    return (
        f"nothing is cached for later commands ({directory() or '~/.cache'}: {error.strerror}); "
        "XDG_CACHE_HOME can name another directory"
    )


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="brt-")


@functools.cache  # The cache makes the function print each message only once.
def _say(text: str) -> None:
    output.say(f"brt: {text}")


_JAX_OPTION = "jax_compilation_cache_dir"


def share_compiled_programs() -> None:
    """Makes JAX store compiled programs in the user's cache, unless JAX's cache is configured."""
    # jax is imported here, because commands that compile nothing need not load it.
    import jax

    variables = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    if any(name in os.environ for name in variables) or getattr(jax.config, _JAX_OPTION):
        return
    if directory := private("programs"):
        jax.config.update(_JAX_OPTION, str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
