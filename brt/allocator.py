"""Settings of memory allocation for commands: glibc's malloc, and Python's garbage collector.

XLA's CPU backend allocates its temporary buffers in every step. By default glibc returns such large
blocks to the system at once, so that each step maps and clears all pages again: 11,000 page faults
per step, which take a quarter of the time of a small model. These settings keep the memory.
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

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # The numbers of mallopt's parameters in <malloc.h>.
_NEVER = 2**31 - 1
_EXHAUSTED = re.compile(
    "RESOURCE_EXHAUSTED|out of memory|can't start new thread|resource temporarily unavailable",
    re.IGNORECASE,
)
_UNMAPPED = re.compile("failed to map segment|cannot map zero-fill pages")
_TUNABLES = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={_NEVER}"
_ASYNC = "JAX_CPU_ENABLE_ASYNC_DISPATCH"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages() -> None:
    """Restarts the process with 2 MB pages if neither the user nor brt has chosen settings.

    Blocks above 64 MB in a thread's arena are mapped again by every allocation, even if memory is
    kept: 60,000 page faults per step of a mid-sized model, a fifth of its time. glibc reads the
    setting that avoids this only when a process starts. The function does nothing without glibc
    2.35 or huge pages, or if `GLIBC_TUNABLES` or `MALLOC_...` are set.
    """
    # The process cannot be restarted if its program was read from standard input.
    if _chosen() or not (sys.executable and "-" not in sys.orig_argv):
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
    """Makes CPU programs run in the calling thread; must precede the first use of devices.

    In jax's own threads, a program's temporary buffer above 64 MB is mapped and cleared by every
    call, which takes a twentieth of the time of a mid-sized model's step. The environment variable
    of jax has priority.
    """
    if _ASYNC not in os.environ:
        import jax  # Commands that only parse flags do not need this import.

        jax.config.update(_ASYNC.lower(), False)


def keep_memory() -> None:
    """Makes malloc keep freed memory; must be called before the first program runs.

    glibc's own environment variables (MALLOC_..., GLIBC_TUNABLES) have priority. Without glibc
    nothing is done.
    """
    if _chosen() or not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def search_rarely() -> None:
    """Makes Python collect cyclic garbage less often, and not at exit.

    Steps create almost no garbage, but imports and traces create millions of lasting objects. With
    the default settings, searching them takes a quarter of the time of a short command.
    """
    gc.set_threshold(100_000, 20, 20)
    atexit.register(gc.freeze)


def exhausted(error: BaseException) -> bool:
    """Returns True if an error, or one of its causes, means that the memory is exhausted."""
    cause: BaseException | None = error
    while cause and not _says_exhausted(cause):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _says_exhausted(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    unmapped = isinstance(error, ImportError) and bool(_UNMAPPED.search(str(error)))
    reported = isinstance(error, RuntimeError) and _EXHAUSTED.search(str(error))
    return isinstance(error, MemoryError) or unmapped or bool(reported)
