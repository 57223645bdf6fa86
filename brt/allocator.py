"""Memory, as commands want it: the C library's allocator and Python's search for garbage.

The allocator keeps the memory that a train step gives back: XLA's CPU backend allocates its
temporary buffers anew at every step. glibc returns such large pieces to the system at once, so that
each step pays for mapping and clearing every page again: 11,000 page faults a step and a quarter of
the time of a small model.
"""

import atexit
import ctypes
import gc
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
_NEVER = 2**31 - 1


def keep_memory() -> None:
    """Called once, before the first program runs; does nothing without glibc.

    glibc's own environment variables (MALLOC_..., GLIBC_TUNABLES) come first.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or not sys.platform.startswith("linux"):
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
