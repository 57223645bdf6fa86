"""Signs of life: who misses one ends by himself, where collectives would wait for ever."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from brt.errors import PeerError

HEARTBEAT_SECONDS = 30  # without a sign of life a process is gone
GRACE_SECONDS = 15  # after a goodbye: for who notices by himself
JOIN_SECONDS = 5  # for threads at the end, which hear at once unless the service is gone
_BEAT_SECONDS = 1.0


class Heartbeat:
    """Threads that tell the others that this process lives, and watch that they do.

    Args:
      client: of the service that texts go through.
      peer: how people know a process.

    Attributes:
      doing: what this process says that it does ("stepping after step 3").
    """

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

    def last_words(self) -> list[str]:
        """What the others did when they were last heard of."""
        return [
            f"{self._peer(index)} was {said}"
            for index, (beat, _) in self._seen.items()
            if index != self._index and (said := _doing(beat))
        ]

    def close(self) -> None:
        """Nobody has to be there any more.

        Python aborts where it ends while a thread is within the service's code.
        """
        self._over.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def _beat(self) -> None:
        beats = 0
        while not self._over.wait(_BEAT_SECONDS):
            beats += 1
            try:
                said = f"{beats} {self.doing()}"
                self._client.key_value_set(f"brt/alive/{self._index}", said, True)
                alive = self._read("brt/alive")
                self._stopped = self._read("brt/stopped")
            except Exception:
                continue  # the service is gone, and with it process 0
            for index in alive.keys() - {self._index}:
                if alive[index] != self._seen[index][0]:
                    self._seen[index] = alive[index], time.monotonic()

    def _watch(self) -> None:
        """Apart from the beats: who asks a process that stands still gets no answer."""
        while not self._over.wait(_BEAT_SECONDS):
            for index, (beat, at) in sorted(self._seen.items()):
                silent = time.monotonic() - at
                reason = self._stopped.get(index)
                if index == self._index or not (beat or index == 0):
                    continue  # one that was never heard of is missed where all meet
                if silent > (GRACE_SECONDS if reason else HEARTBEAT_SECONDS):
                    self._end(index, silent, reason)

    def _read(self, place: str) -> dict[int, str]:
        found = self._client.key_value_dir_get(place)
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def _end(self, index: int, silent: float, reason: str | None) -> None:
        if self._over.is_set():
            return
        said = _doing(self._seen[index][0])
        last = f", last while {said}" * bool(said)
        why = f"has given no sign of life for {silent:.0f} s{last}"
        why = f"has stopped: {reason}" if reason else why
        print(
            f"brt: {self._peer(index)} {why}; start all processes again to go on from the newest "
            "checkpoint", file=sys.stderr, flush=True,
        )  # fmt: skip
        os._exit(PeerError.exit_code)


def _doing(beat: str) -> str:
    return beat.partition(" ")[2]
