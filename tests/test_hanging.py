"""Tests that a process ends normally even if some of its threads cannot be stopped."""

import subprocess
import sys

_LIFE = """
import argparse, socket, sys, threading, time, types
from brt import command_line, hanging
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
    hanging.join(thread, 0.2)
    print("done")
    return 75

command_line.main(command, argparse.ArgumentParser())
"""


def test_a_thread_in_the_coordinators_code_does_not_abort_the_process() -> None:
    life = subprocess.run(
        [sys.executable, "-c", _LIFE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (life.returncode, life.stdout, life.stderr) == (75, "done\n", "")
