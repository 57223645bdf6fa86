"""Tests that the process keeps freed memory, unless the user configures malloc, and how it ends."""

import errno
import os
import subprocess
import sys

import jax
import pytest

from brt import command_line, runtime

PROGRAM = """
import ctypes, resource, threading
from brt import runtime
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
c.malloc.argtypes, c.memset.argtypes = [ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size = 96 << 20
def step():
    piece = c.malloc(size)
    c.memset(piece, 1, size)
    c.free(piece)
def two_steps():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""  # noqa: E501
STEP = """
import resource, statistics
import jax, jax.numpy as jnp
from brt import runtime
runtime.keep_memory()
runtime.disable_async_dispatch()
def large(x):  # 96 MB that no fusion spares
    return jax.lax.fori_loop(0, 2, lambda i, y: y + i, jnp.full((24 << 20,), x))
step = jax.jit(lambda x: jnp.sum(large(x)))
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(1.0).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# The heap may still grow at some of them, and elsewhere some may find it grown.
print(statistics.median(faults() for _ in range(9)))
"""
KEEPING = PROGRAM + "runtime.keep_memory()\ntwo_steps()"
IN_A_THREAD = PROGRAM + "threading.Thread(target=two_steps).start()"
HUGE_PAGES = PROGRAM + "runtime.use_huge_pages()\nthreading.Thread(target=two_steps).start()"


def run(program: str, *arguments: str, **environment: str) -> str:
    """Runs a Python program without the user's settings of malloc, and returns what it prints."""
    clean = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=clean | environment, capture_output=True, check=True, text=True,
    )  # fmt: skip
    return done.stdout


def faults(program: str = KEEPING, **environment: str) -> int:
    """Returns the number of page faults in the second step of a program that uses 96 MB."""
    return int(run(program, **environment))


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
huge_pages = pytest.mark.skipif(
    not (runtime._huge_pages() and runtime._glibc() >= (2, 35)), reason="no huge pages"
)


@linux
def test_the_second_step_maps_no_pages_again() -> None:
    assert faults() < 100


@linux
def test_the_users_own_setting_stands() -> None:
    assert faults(MALLOC_MMAP_THRESHOLD_="1000000") > 10_000


@pytest.mark.slow  # It starts up to eleven processes that import jax.
@linux
def test_programs_that_run_in_place_map_no_pages_again() -> None:
    assert faults(STEP) < 100
    elsewhere = STEP.replace("runtime.disable_async_dispatch()\n", "")
    # By chance, the thread of a process may keep its memory, too. Of ten processes, at least one
    # maps its pages again.
    again = any(faults(elsewhere) > 10_000 for _ in range(10))
    assert again, "or there is nothing to spare any more"


@pytest.mark.parametrize("users", ["", "true"])
def test_jax_s_own_variable_comes_first(users: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "jax_cpu_enable_async_dispatch"
    monkeypatch.delenv(name.upper(), raising=False)
    if users:
        monkeypatch.setenv(name.upper(), users)
    before = jax.config.read(name)
    jax.config.update(name, True)
    try:
        runtime.disable_async_dispatch()
        assert jax.config.read(name) == bool(users)
    finally:
        jax.config.update(name, before)


@huge_pages
def test_a_thread_maps_few_pages_again() -> None:
    assert faults(IN_A_THREAD) > 10_000, "or there is nothing to spare any more"
    assert faults(HUGE_PAGES) < 1000


@huge_pages
def test_beginning_anew_keeps_arguments_and_the_users_own_setting() -> None:
    program = "import os, sys\nfrom brt import runtime\nprint(os.getpid(), flush=True)\n"
    program += "runtime.use_huge_pages()\nprint(*sys.argv[1:])"
    first, second, said = run(program, "--a", "b c").splitlines()
    assert first == second and said == "--a b c"
    assert len(run(program, GLIBC_TUNABLES="glibc.malloc.check=0").splitlines()) == 2


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes"), True),
        (RuntimeError("can't start new thread"), True),
        (ImportError("x.so: failed to map segment from shared object"), True),
        (ImportError("y.so: cannot map zero-fill pages"), True),
        (RuntimeError("Resource temporarily unavailable"), True),  # raised if a thread cannot start
        (ImportError("no module x"), False),
        (OSError(errno.EIO, "out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_no_memory_is_left(error, exhausted):
    assert runtime.exhausted(error) == exhausted
    try:
        raise KeyError("another") from error
    except KeyError as later:
        assert runtime.exhausted(later) == exhausted


def test_a_command_without_memory_ends_with_a_sentence(monkeypatch, capsys):
    def starved(arguments):
        raise MemoryError

    monkeypatch.setattr(sys, "argv", ["brt.train"])
    with pytest.raises(SystemExit) as ended:
        command_line.main(starved, command_line.parser("of a test"))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("brt: error: out of memory; lower Training.batch_size")
    assert said.count("\n") == 1


_LIFE = """
import argparse, socket, sys, threading, time, types
from brt import command_line, runtime
from jax._src.lib import _jax

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
service = _jax.get_distributed_runtime_service(address, 1)
client = _jax.get_distributed_runtime_client(address, 0, init_timeout=20)
client.connect()

def wait():
    try:
        client.blocking_key_value_get("never written", 1500)
    except Exception:
        pass

class Slow:  # makes Python's shutdown last until the thread returns from the service's code
    def __del__(self, sleep=time.sleep):
        sleep(3)

sys.modules["slow"] = types.ModuleType("slow")
sys.modules["slow"].slow = Slow()

def command(arguments):
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    runtime.join(thread, 0.2)
    print("done")
    return 75

command_line.main(command, argparse.ArgumentParser())
"""


@pytest.mark.slow
def test_a_thread_in_the_coordinators_code_does_not_abort_the_process() -> None:
    life = subprocess.run(
        [sys.executable, "-c", _LIFE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (life.returncode, life.stdout, life.stderr) == (75, "done\n", "")
