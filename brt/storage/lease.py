"""The lock of a run directory in a bucket: an object that its holder renews.

A bucket has no locks that end with a process. A process that finds the object watches it. If the
object is not renewed for LEASE_SECONDS, the holder is dead or cut off, and the watching process
takes over. A holder that cannot renew the object for LEASE_SECONDS stops by itself. Each machine
measures this time with its own clock; the clocks of two machines are not compared.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brt import untrusted
from brt.errors import BrtError, ConfigError
from brt.storage.objects import ABSENT, Bucket

LEASE_SECONDS = 60.0
_KEY = ".lock"


class Lease:
    """Context that holds the lock of a run directory in a bucket; a thread renews it.

    `lost` is a sentence that says why the process does not hold the lock any more; "" while the
    process holds it. `warn` is called with a message if another trainer has ended without releasing
    the lock, or may have done so. ConfigError is raised if another trainer holds the lock.
    """

    def __init__(self, bucket: Bucket, place: str, warn: Callable[[str], None]):
        self._bucket, self._place, self._warn = bucket, place, warn
        self._holder = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "machine": machine(), "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "id": secrets.token_hex(8),
        }  # fmt: skip
        self._generation = ABSENT
        self._turn, self._ended = threading.Lock(), threading.Event()
        self.lost = ""

    def __enter__(self) -> "Lease":
        found = self._bucket.read(_KEY)
        if found and found.content:
            self._wait_until_abandoned(found.generation, _parsed(found.content))
        if not self._write(found.generation if found else ABSENT):
            raise self._in_use("starting")
        self._thread = threading.Thread(target=self._renew_regularly, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if not self.lost:
            # Errors are ignored: if the lock is not emptied, the next trainer takes over as from a
            # trainer that was killed.
            with contextlib.suppress(BrtError):
                self._replace(self._generation, b"")

    def confirm(self) -> None:
        """Renews the lock if its last renewal is older than a quarter of LEASE_SECONDS."""
        if _now() - self._renewed > LEASE_SECONDS / 4:
            self.renew()

    def renew(self) -> None:
        """Renews the lock now; sets `lost` if another trainer has taken it over."""
        with self._turn:
            if not self.lost and not self._write(self._generation):
                self.lost = (
                    f"another trainer has taken over {self._place}, because this one could not "
                    "be seen there; it goes on from the newest checkpoint"
                )

    def _write(self, replaces: bytes) -> bool:
        self._holder["renewed"] = secrets.token_hex(4)
        return self._replace(replaces, json.dumps(self._holder).encode())

    def _replace(self, generation: bytes, content: bytes) -> bool:
        begin = _now()
        written = self._bucket.write(_KEY, content, replaces=generation)
        if written is None:
            # An earlier write may count as failed here, although the bucket has carried it out. The
            # lock then has this holder's id.
            found = self._bucket.read(_KEY)
            if found and _parsed(found.content).get("id") == self._holder["id"]:
                written = self._bucket.write(_KEY, content, replaces=found.generation)
        if written is None:
            return False
        self._generation, self._renewed = written, begin
        return True

    def _renew_regularly(self) -> None:
        while not self.lost and not self._ended.wait(LEASE_SECONDS / 5):
            with contextlib.suppress(BrtError):
                self.renew()
            if _now() - self._renewed > LEASE_SECONDS:
                self.lost = (
                    f"the lock in {self._place} could not be renewed for {LEASE_SECONDS:.0f} s; "
                    "see to the network, then run again to go on from the newest checkpoint"
                )

    def _wait_until_abandoned(self, generation: bytes, holder: dict[str, Any]) -> None:
        """Waits LEASE_SECONDS, unless the holder is known to be dead.

        Raises ConfigError if the lock changes or is deleted meanwhile.
        """
        name = str(holder.get("holder", "unknown"))[:200]
        end = _now() + LEASE_SECONDS
        if not (dead := _has_ended(holder)):
            self._warn(
                f"{self._place} was in use by {name}; looking for {LEASE_SECONDS:.0f} s whether it "
                "still is"
            )
        while not dead and _now() < end:
            time.sleep(min(1.0, LEASE_SECONDS / 10))
            found = self._bucket.read(_KEY)
            if not found or found.generation != generation:
                raise self._in_use(f"{name}, started {holder.get('started', '?')}")
        self._warn(f"taking over from a trainer that was killed ({name})")

    def _in_use(self, holder: str) -> ConfigError:
        return ConfigError(
            f"{self._place} is in use by another trainer ({holder}); wait for it, stop it, or "
            "choose another --workdir"
        )


def _now() -> float:
    """Returns the seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        return untrusted.checked_json(content, {})
    except ValueError:
        return {}


def machine() -> str:
    """Returns a text that is equal only for processes that see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


def _has_ended(holder: dict[str, Any]) -> bool:
    """Returns True if the holder was a process of this machine that has ended."""
    if holder.get("machine") != machine() or not isinstance(holder.get("pid"), int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
