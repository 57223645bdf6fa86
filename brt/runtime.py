"""Settings of this process: its memory, its devices, and how it ends.

XLA's CPU backend allocates its temporary buffers in every step. By default glibc returns such large
blocks to the system at once, so that each step maps and clears all pages again. This causes 11,000
page faults per step, which take a quarter of the time of a small model. With the settings here,
malloc keeps the memory.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib.util
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # numbers of parameters of mallopt
_NEVER = 2**31 - 1
_EXHAUSTED = re.compile(
    "RESOURCE_EXHAUSTED|out of memory|can't start new thread|resource temporarily unavailable",
    re.IGNORECASE,
)
_UNMAPPED = re.compile("failed to map segment|cannot map zero-fill pages")
_TUNABLES = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={_NEVER}"
_ASYNC = "JAX_CPU_ENABLE_ASYNC_DISPATCH"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA = ("nvidia*", "nvhost*", "nvgpu*", "dxg")
# Each pair belongs to a kind of accelerator: the package that compiles for it, and the device files
# of a machine that has it.
_COMPILERS = {
    "libtpu": ("accel*", "vfio/*"),
    "jax_cuda12_plugin": _NVIDIA,
    "jax_cuda13_plugin": _NVIDIA,
}
_hanging: list[threading.Thread] = []
# The value of `time.monotonic()` when this process began; None if this process is no command.
began: float | None = None
# A thread may hang in code of a library, or of a file system. Code that waits for the end of a
# thread waits at most this many seconds.
JOIN_SECONDS = 5.0


def use_huge_pages() -> None:
    """Restarts the process so that malloc uses pages of 2 MB.

    The restarted process sees from the environment variable `GLIBC_TUNABLES` that it need not be
    restarted again. The function does nothing without glibc 2.35 or huge pages, or if the user has
    set `GLIBC_TUNABLES` or `MALLOC_...`.
    """
    # In a thread other than the main one, malloc maps blocks above 64 MB again for every
    # allocation, even after `keep_memory`. This causes 60,000 page faults per step of a mid-sized
    # model, which take a fifth of the step's time. Larger pages cause fewer faults, but glibc reads
    # this setting only when a process starts.
    # A restart needs the path of Python, and a program that can be read again. A program from
    # standard input ("-") can be read only once.
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


def age() -> float:
    """Returns the seconds since this process was started; 0.0 where the system has no /proc."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name of the program, in parentheses, may contain anything. The first field after the
        # name is field 3 of the file. Field 22 is the start of the process, in ticks since the
        # system's start.
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        started = int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    return 0.0


def disable_async_dispatch() -> None:
    """Makes jax run CPU programs in the calling thread; must precede the first use of devices.

    If the environment variable JAX_CPU_ENABLE_ASYNC_DISPATCH is set, nothing is changed.
    """
    # In jax's own threads, every call of a program maps and clears a temporary buffer above 64 MB
    # again, which takes a twentieth of the time of a mid-sized model's step.
    if _ASYNC not in os.environ:
        import jax  # Commands that only parse flags do not need this import.

        jax.config.update(_ASYNC.lower(), False)


def keep_memory() -> None:
    """Makes malloc keep freed memory; must be called before jax runs the first program.

    If glibc's own environment variables (MALLOC_..., GLIBC_TUNABLES) are set, or the system does
    not use glibc, nothing is changed.
    """
    if _chosen() or not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def collect_garbage_rarely() -> None:
    """Makes Python collect cyclic garbage less often, and not at exit."""
    # Training steps create almost no garbage, but imports and traces by jax create millions of
    # lasting objects. With Python's default settings, the search for garbage among these objects
    # takes a quarter of the time of a short command.
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


def use_cpus(count: int | None = None) -> None:
    """Makes jax run on the CPU alone; must be called before jax is asked for its devices.

    `count` is the number of devices on the CPU; None takes the number in XLA_FLAGS, or 1.
    """
    import jax  # Commands that only parse flags do not need this import.

    # Environment variables would have no effect, because jax reads them only when it is imported.
    jax.config.update("jax_platforms", "cpu")
    if count is not None:
        jax.config.update("jax_num_cpu_devices", count)


def use_cpu_without_accelerator(devices: Path = Path("/dev")) -> None:
    """Makes jax use the CPU if this machine has a compiler for accelerators but no accelerator.

    The packages of brt[tpu-compile] and brt[gpu-compile] can compile for accelerators of other
    machines. If they are installed, jax looks for accelerators on this machine, and prints
    tracebacks if there are none.
    """
    installed = [name for name in _COMPILERS if importlib.util.find_spec(name)]
    files = {pattern for name in installed for pattern in _COMPILERS[name]}
    if installed and not any(any(devices.glob(pattern)) for pattern in files):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


@contextlib.contextmanager
def repeating(
    work: Callable[[], object], seconds: float, name: str, at_end: Callable[[], object] = bool
) -> Iterator[Callable[[], None]]:
    """Context in which a daemon thread calls `work` every `seconds`, and `at_end` at the end.

    Yields a function that makes the thread call `work` at once. Calls may hang, so the end of the
    context waits for the thread for at most JOIN_SECONDS.
    """
    over, due = threading.Event(), threading.Event()

    def run() -> None:
        while not over.is_set():
            work()
            due.wait(seconds)
            due.clear()
        at_end()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield due.set
    finally:
        over.set()
        due.set()
        join(thread)


def join(thread: threading.Thread, seconds: float = JOIN_SECONDS) -> None:
    """Waits for the end of a daemon thread, for at most `seconds`. A thread that has not ended by
    then is remembered for `leave`.
    """
    thread.join(seconds)
    if thread.is_alive():
        _hanging.append(thread)


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code."""
    # A thread that waits in C++ code, for example for a process that is gone, may return while
    # Python shuts down. Python then ends the thread in a way that aborts the whole process, with
    # exit code 134. A process with such a thread therefore ends without shutting down Python.
    if any(thread.is_alive() for thread in _hanging):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
