"""Heartbeats, by which processes notice that another process has died.

A collective operation would wait for a dead process for ever. Each process therefore publishes a
counter every second, and exits if the counter of another process does not change for a long time.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from brt import hanging, output
from brt.errors import PeerError

HEARTBEAT_SECONDS = 30  # A process is considered dead after this many seconds without a heartbeat.
# After a process has announced its end, the other processes have this many seconds to end by
# themselves.
GRACE_SECONDS = 15
# A thread may never end if the key-value service is gone. Code that waits for the end of a thread
# therefore waits at most this many seconds.
JOIN_SECONDS = 5
_BEAT_SECONDS = 1.0


class Heartbeat:
    """Threads that publish this process's heartbeat and watch the heartbeats of other processes.

    This process exits if the heartbeat of another process stops. `client` is the client of JAX's
    key-value service, and `peer` a function from the index of a process to its name in messages.
    """

    # Returns the current activity of this process, such as "stepping after step 3", which the other
    # processes mention in their messages.
    doing: Callable[[], str] = str

    def __init__(self, client: Any, index: int, count: int, peer: Callable[[int], str]):
        self._client, self._index, self._peer = client, index, peer
        self._over = threading.Event()
        self._seen = dict.fromkeys(range(count), ("", time.monotonic()))
        self._stopped: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=work, name="heartbeat", daemon=True)
            for work in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def last_activities(self) -> list[str]:
        """Returns phrases such as "process 1 of 2 was stepping after step 3"."""
        return [
            f"{self._peer(index)} was {activity}"
            for index, (beat, _) in self._seen.items()
            if index != self._index and (activity := _doing(beat))
        ]

    def close(self) -> None:
        """Stops the threads, so that this process no longer exits when another process ends."""
        self._over.set()
        for thread in self._threads:
            # Python aborts if it exits while a thread is inside the code of the key-value service
            # (see `hanging.leave`).
            hanging.join(thread, JOIN_SECONDS)

    def _beat(self) -> None:
        beats = 0
        while not self._over.wait(_BEAT_SECONDS):
            beats += 1
            try:
                activity = f"{beats} {self.doing()}"
                self._client.key_value_set(f"brt/alive/{self._index}", activity, True)
                alive = self._read("brt/alive")
                self._stopped = self._read("brt/stopped")
            except Exception:
                # Process 0 has ended, and the key-value service has ended with it. The method
                # `_watch` will notice this, so nothing is done here.
                continue
            for index in alive.keys() - {self._index}:
                if alive[index] != self._seen[index][0]:
                    self._seen[index] = alive[index], time.monotonic()

    def _watch(self) -> None:
        # This method and `_beat` run in different threads, because the requests that `_beat` sends
        # to process 0 do not return while process 0 is suspended.
        while not self._over.wait(_BEAT_SECONDS):
            for index, (beat, last_time) in sorted(self._seen.items()):
                silent = time.monotonic() - last_time
                reason = self._stopped.get(index)
                # This method ignores processes that never had a heartbeat. The next call of
                # `processes.gather` notices such processes.
                if index == self._index or not (beat or index == 0):
                    continue
                if silent > (GRACE_SECONDS if reason else HEARTBEAT_SECONDS):
                    self._end(index, silent, reason)

    def _read(self, place: str) -> dict[int, str]:
        entries = self._client.key_value_dir_get(place)
        return {int(key.rpartition("/")[2]): value for key, value in entries}

    def _end(self, index: int, silent: float, reason: str | None) -> None:
        if self._over.is_set():
            return
        activity = _doing(self._seen[index][0])
        last = f", last while {activity}" * bool(activity)
        why = f"has given no sign of life for {silent:.0f} s{last}"
        why = f"has stopped: {reason}" if reason else why
        output.say(
            f"brt: {self._peer(index)} {why}; start all processes again to continue from the "
            "newest checkpoint"
        )
        os._exit(PeerError.exit_code)


def _doing(beat: str) -> str:
    return beat.partition(" ")[2]
