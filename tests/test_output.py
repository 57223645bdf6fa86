"""Tests that messages of library threads are not printed if they repeat a reported failure."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import threading
from brt import output
output.silence_later_errors()
class Array:
    def __init__(self, text):
        self.text = text
    def __del__(self):
        raise RuntimeError(self.text)
for text in ("Event loop is closed", "another"):
    thread = threading.Thread(target=Array, args=(text,))
    thread.start()
    thread.join()
Array("Event loop is closed")
"""


def test_failures_of_threads_whose_loop_has_ended_are_not_printed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("RuntimeError")]
    assert said == ["RuntimeError: another", "RuntimeError: Event loop is closed"]


CLOSED = """
from brt import output
output.silence_later_errors()
async def array(text):
    try:
        await forever
    except GeneratorExit as error:
        raise Exception(text) from error
class Forever:
    def __await__(self):
        yield
forever = Forever()
reading = array("of the second array")
reading.send(None)
del reading
print("done")
"""


def test_failures_of_coroutines_that_are_closed_are_not_printed() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


UNCACHED = """
import shutil, sys
from pathlib import Path
import jax
from brt import output
output.say_warnings()
place = Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", str(place))
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x + 1)(1.0)
shutil.rmtree(place)
place.touch()
for power in (2, 3, 4):
    jax.jit(lambda x: x**power)(1.0)
"""


def test_a_failing_cache_of_programs_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNCACHED, str(tmp_path / "programs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith("brt: warning: compiled programs are not cached") and "Errno" in line
