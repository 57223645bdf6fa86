"""When several processes stop."""

import contextlib
import sys
import threading
from collections.abc import Callable

import jax

from brt.distributed.processes import PATIENCE_SECONDS, gather, peer, service


class AgreedStop:
    """One process is asked to stop, and all stop at the same look at it.

    Every process looks as often as the others (`due`). Who is asked says so; a thread of each
    then tells the others how far its process has looked, and the furthest is where all stop.

    Args:
      asked: what asks this process to stop, None before it.
      announce: told why this process will stop, where another one was asked.
    """

    def __init__(self, asked: Callable[[], str | None], announce: Callable[[str], None]):
        self._asked, self._announce = asked, announce
        self._lock, self._agreed = threading.Lock(), threading.Event()
        self._looks, self._frozen, self._at = 0, False, sys.maxsize
        self.reason: str | None = None
        self._over = False
        threading.Thread(target=self._watch, name="agreement", daemon=True).start()

    def due(self) -> str | None:
        """Why to stop here, None: go on."""
        with self._lock:
            waits = self._frozen
            if not waits:
                self._looks += 1
        if waits:
            self._agreed.wait(PATIENCE_SECONDS)
            with self._lock:
                self._looks += 1
        return self.reason if self._looks > self._at else None

    def close(self) -> None:
        """No process looks any more."""
        self._over = True

    def _watch(self) -> None:
        texts, told = service(), False
        while not self._over:
            if (asked := self._asked()) and not told:
                told = True
                with contextlib.suppress(Exception):  # another one was faster
                    texts.key_value_set("brt/stop", f"{asked} to {peer(jax.process_index())}")
            try:
                reason = texts.blocking_key_value_get("brt/stop", 200)
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                return
            if not told:
                self._announce(reason)
            self._settle(reason)
            return

    def _settle(self, reason: str) -> None:
        with self._lock:
            self._frozen = True
            looks = self._looks
        try:
            self._at = max(int(n) for n in gather("stop", str(looks)))
            self.reason = reason
        finally:
            self._agreed.set()
