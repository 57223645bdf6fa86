"""Memory, as commands want it: the C library's allocator and Python's search for garbage.

The allocator keeps the memory that a train step gives back: XLA's CPU backend allocates its
temporary buffers anew at every step. glibc returns such large pieces to the system at once, so that
each step pays for mapping and clearing every page again: 11,000 page faults a step and a quarter of
the time of a small model.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import os
import platform
import re
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
_NEVER = 2**31 - 1
_EXHAUSTED = re.compile("RESOURCE_EXHAUSTED|out of memory|can't start new thread", re.IGNORECASE)
_TUNABLES = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={_NEVER}"
_ASYNC = "JAX_CPU_ENABLE_ASYNC_DISPATCH"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages() -> None:
    """Begins the process anew in its place, with pages of 2 MB, where that is not chosen yet.

    What is larger than 64 MB a thread's arena maps anew each time, whatever is kept: 60,000 faults
    a step of a mid-sized model, a fifth of its time. glibc reads this one setting at its start
    only. Nothing happens without glibc 2.35 or pages of that size, nor where `GLIBC_TUNABLES` or
    `MALLOC_...` are set, which come first.
    """
    if _chosen() or not (sys.executable and "-" not in sys.orig_argv):  # stdin is read once
        return
    if _glibc() >= (2, 35) and _huge_pages():
        os.environ["GLIBC_TUNABLES"] = _TUNABLES
        os.execv(sys.executable, sys.orig_argv)


def _chosen() -> bool:
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)


def _glibc() -> tuple[int, ...]:
    library, version = platform.libc_ver()
    return tuple(map(int, version.split("."))) if library == "glibc" else ()


def _huge_pages() -> bool:
    with contextlib.suppress(OSError):
        return "[never]" not in _HUGE_PAGES.read_text()
    return False


def run_in_place() -> None:
    """CPU programs run in the thread that calls them; before jax has found its devices.

    In one of jax's own threads a program's temporary buffer, if larger than 64 MB, is mapped and
    cleared anew by each call, whatever is kept: a twentieth of a mid-sized model's step. jax's own
    variable comes first.
    """
    if _ASYNC not in os.environ:
        import jax  # here: what only re-executes or parses flags goes without

        jax.config.update(_ASYNC.lower(), False)


def keep_memory() -> None:
    """Called once, before the first program runs; does nothing without glibc.

    glibc's own environment variables (MALLOC_..., GLIBC_TUNABLES) come first.
    """
    if _chosen() or not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def search_rarely() -> None:
    """Python searches for cycles of garbage less often, and not on the way out.

    A step leaves none to speak of; imports and traces make millions of objects that stay, which the
    interpreter's own settings search again and again: a quarter of a short command's time.
    """
    gc.set_threshold(100_000, 20, 20)
    atexit.register(gc.freeze)


def exhausted(error: BaseException) -> bool:
    """Whether an error, or one that it came of, says that no memory is left."""
    found: BaseException | None = error
    while found and not _says_exhausted(found):
        found = found.__cause__ or found.__context__
    return found is not None


def _says_exhausted(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    unmapped = isinstance(error, ImportError) and "failed to map segment" in str(error)
    told = isinstance(error, RuntimeError) and _EXHAUSTED.search(str(error))
    return isinstance(error, MemoryError) or unmapped or bool(told)
