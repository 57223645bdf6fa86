"""Freed memory stays with the process, unless the user set the allocator."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource
from brt import allocator
allocator.keep_memory()
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
c.malloc.argtypes, c.memset.argtypes = [ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size = 64 << 20
def step():
    piece = c.malloc(size)
    c.memset(piece, 1, size)
    c.free(piece)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""  # noqa: E501


def faults(**environment: str) -> int:
    """Page faults of the second step that uses 64 MB."""
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environment, capture_output=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_the_second_step_maps_no_pages_again() -> None:
    assert faults() < 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_the_users_own_setting_stands() -> None:
    assert faults(MALLOC_MMAP_THRESHOLD_="1000000") > 10_000
