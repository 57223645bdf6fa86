"""Reads files of strangers in child processes, whose memory and time are limited.

Libraries in other languages read some kinds of files, and a crafted file can make them take any
memory, run for ever, or end the process. Therefore a child process first reads a file as brt will
read it. A seal (an empty file in the user's cache) says that this trial succeeded, so that no file
is tried twice. Files that brt has written get a seal at once. Programs in files of strangers, such
as chat templates, always run in a child process, a `Worker`.
"""

import atexit
import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from brt import user_cache

MEMORY = 2 << 30  # the default limit of a child's memory, in bytes
SECONDS = 30  # the default limit of a child's CPU time
_SAID = 300  # At most this number of characters of a child's message are read.
_ONE_THREAD = {
    "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0",
}  # fmt: skip


class Refused(ValueError):
    """The trial of a file failed; the message says why."""


def key(*parts: bytes) -> str:
    """Returns a hash of all that a trial (reading a file in a child process) depends on."""
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def trust(key: str) -> None:
    """Creates the seal of a file that brt has written, so that the file is not tried."""
    _tried.add(key)
    user_cache.seal("tried", key)


def trusted(key: str) -> bool:
    """Returns True if a file was tried before with success, or if brt has written it."""
    return key in _tried or user_cache.sealed("tried", key)


def check(
    module: str, content: bytes, key: str, *, memory: int = MEMORY, seconds: int = SECONDS
) -> None:
    """Reads `content` in a child process, unless the `key` is `trusted`.

    The child runs the module. The module must call `serve`, a function of this file, with a
    function that reads the content. The child may take `memory` bytes, which macOS does not
    enforce, and `seconds` of CPU time. Refused is raised if the child refuses the content, crashes,
    or exceeds a limit.
    """
    if trusted(key):
        return
    try:
        done = subprocess.run(
            _command(module, memory, seconds),
            input=content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=2 * seconds,
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"it takes more than {2 * seconds} seconds") from None
    if done.returncode == -signal.SIGXCPU:
        raise Refused(f"it takes more than {seconds} seconds")
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        raise Refused(said or _too_much(memory))
    trust(key)


def _command(module: str, memory: int, seconds: int) -> list[str]:
    # With -P, no module of the current directory is imported.
    return [sys.executable, "-P", "-m", module, str(memory), str(seconds)]


def _environment() -> dict[str, str]:
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _too_much(memory: int) -> str:
    return f"it takes more than {memory:,} bytes of memory, or ends its reader"


class Worker:
    """A child process that answers requests. Its memory and its time for each request are limited.

    The child runs the module, which must call `answer`, a function of this file. The child is
    started for the first request, and ends with this process.
    """

    def __init__(self, module: str, *, memory: int = MEMORY, seconds: int = SECONDS):
        self._module, self._memory, self._seconds = module, memory, seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None
        atexit.register(self._end)

    def ask(self, request: bytes) -> bytes:
        """Sends a request of one line, and returns the answer, which is one line, too. Raises
        Refused if the child does not answer.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._end()
                self._child = subprocess.Popen(
                    _command(self._module, self._memory, self._seconds),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                )
            child, answer = self._child, b""
            try:
                assert child.stdin and child.stdout
                child.stdin.write(request + b"\n")
                child.stdin.flush()
                answer = child.stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                # The child must end after Ctrl-C, too. If it did not, the next request would get
                # the answer to this request.
                if not answer:
                    self._end()
            if not answer:
                late = child.returncode == -signal.SIGXCPU
                why = f"it takes more than {self._seconds} seconds"
                raise Refused(why if late else _too_much(self._memory))
            return answer

    def _end(self) -> None:
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None


def answer(function: Callable[[bytes], bytes]) -> None:
    """In the child of a `Worker`, answers each request with `function`, until the parent ends."""
    memory, seconds = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent.
    _limit({resource.RLIMIT_CORE: 0, resource.RLIMIT_DATA: memory})
    for request in sys.stdin.buffer:
        _limit({resource.RLIMIT_CPU: int(time.process_time()) + seconds + 1})
        try:
            found = function(request)
        except MemoryError:
            sys.exit(1)
        sys.stdout.buffer.write(found + b"\n")
        sys.stdout.buffer.flush()


def _limit(limits: Mapping[int, int]) -> None:
    """Sets limits of this process, as far as the system allows it.

    `limits` maps the number of a kind of limit, such as resource.RLIMIT_CPU, to the limit.
    """
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))


def serve(function: Callable[[bytes], None]) -> None:
    """In the child process, calls a function with the content that the parent passed to `check`.

    The function raises `Refused` if the content must not be used. Other errors, except panics of
    libraries in Rust, are not reported, because brt meets and explains them when it reads the file.
    """
    memory, seconds = map(int, sys.argv[1:])
    # RLIMIT_DATA counts no addresses that are only reserved, unlike RLIMIT_AS.
    _limit({resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: seconds, resource.RLIMIT_DATA: memory})
    try:
        function(sys.stdin.buffer.read())
    except MemoryError:
        sys.exit(1)
    except BaseException as error:
        # A panic of a library in Rust is an exception whose class does not derive from Exception.
        if isinstance(error, Refused) or not isinstance(error, Exception):
            sys.stdout.write(f"{error}"[:_SAID])
            sys.exit(1)


_tried: set[str] = set()
